// Answers queries with the search of the built site: the worker that its pages start, on its index.
// node docs/search_site.mjs SITE < queries as a JSON list > for each, the pages found, best first
import { readFileSync, readdirSync } from "node:fs";
import { join } from "node:path";
import vm from "node:vm";

const site = process.argv[2];
const workers = join(site, "assets", "javascripts", "workers");
const [file] = readdirSync(workers).filter((name) => /^search\..*\.js$/.test(name));
const { config, docs } = JSON.parse(readFileSync(join(site, "search", "search_index.json"), "utf8"));

let receive;
let answer;
const scope = {
  addEventListener: (_, listener) => { receive = listener; },
  postMessage: (message) => answer(message),
  console,
};
scope.self = scope;
vm.runInNewContext(readFileSync(join(workers, file), "utf8"), scope);

function ask(message) {
  return new Promise((resolve) => {
    answer = resolve;
    receive({ data: message });
  });
}

await ask({ type: 0, data: { config, docs, options: { suggest: true } } });
const found = [];
for (const query of JSON.parse(readFileSync(0, "utf8"))) {
  const { data } = await ask({ type: 2, data: query });
  found.push(data.items.map(([first]) => first.location));
}
console.log(JSON.stringify(found));
