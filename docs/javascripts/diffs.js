// Copying a diff gives the new lines, without the signs in front of them.
document$.subscribe(() => {
  for (const code of document.querySelectorAll(".language-diff pre > code")) {
    const lines = code.textContent.split("\n").filter((line) => !line.startsWith("-"));
    code.parentElement.setAttribute("data-copy", lines.map((line) => line.replace(/^[+ ] /, "")).join("\n"));
  }
});
