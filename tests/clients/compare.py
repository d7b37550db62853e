"""Compare two result files of the harness and print a table."""

import json
import math
import sys


def close(a, b, tolerance):
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return [f"keys {sorted(set(a) ^ set(b))}"]
        return [f"{k}.{d}" if not d.startswith(":") else f"{k}{d}" for k in a for d in close(a[k], b[k], tolerance)]
    if isinstance(a, list) and isinstance(b, list):
        if len(a) != len(b):
            return [f": {len(a)} items / {len(b)}: {str(sorted(set(map(str, a)) ^ set(map(str, b))))[:300]}"]
        return [
            f"{i}.{d}" if not d.startswith(":") else f"{i}{d}"
            for i, (x, y) in enumerate(zip(a, b))
            for d in close(x, y, tolerance)
        ]
    if isinstance(a, float) and isinstance(b, (int, float)) and not isinstance(b, bool):
        return (
            []
            if a == b or (math.isnan(a) and math.isnan(b)) or abs(a - b) <= tolerance * max(abs(a), abs(b))
            else [f": {a!r} / {b!r}"]
        )
    return [] if a == b else [f": {str(a)[:200]} / {str(b)[:200]}"]


a, b = (json.load(open(f)) for f in sys.argv[1:3])
equal = near = 0
for name in {**a, **b}:
    if name == "accelerate":
        continue
    if name not in a or name not in b:
        print(f"{name:40} only in {'first' if name in a else 'second'}")
        continue
    x, y = a[name], b[name]
    if "error" in x or "error" in y:
        print(f"{name:40} ERROR accel: {x.get('error', '-')[:330]} | ref: {y.get('error', '-')[:330]}")
        continue
    exact = close(x["value"], y["value"], 0)
    if not exact:
        equal += 1
        continue
    differ = [d for d in close(x["value"], y["value"], 1e-5) if "digest" not in d]
    if not differ:
        near += 1
        print(f"{name:40} equal to 1e-5 ({len(exact)}: {exact[0][:90]})")
        continue
    print(f"{name:40} DIFFERS ({len(differ)}): {'; '.join(differ[:3])[:500]}")
print(
    f"{equal} equal to the bit, {near} to 1e-5, of {len(a) - 1} / {len(b) - 1}; seconds {sum(v['seconds'] for k, v in a.items() if k != 'accelerate'):.0f} / {sum(v['seconds'] for k, v in b.items() if k != 'accelerate'):.0f}"
)
