"""Runs the snippets of pages that arrive as JSON on stdin: one forked process a page, one namespace a page.

Names that pages use without defining them (``model``, ``loader``, ...) exist before the first snippet. Prints a report
as JSON.
"""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import sys
import time
import traceback
from typing import Any

from forked import forked, preload

IMPORTS = """
import os
import torch
import torch.optim.lr_scheduler
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from accel import *
"""
PRELUDE = f"""{IMPORTS}
torch.manual_seed(0)
accelerator = Accelerator(cpu=True)
device = accelerator.device
loss_function = nn.functional.cross_entropy
features, labels = torch.randn(32, 10), torch.randint(0, 2, (32,))
loader = DataLoader(TensorDataset(features, labels), batch_size=4)
train_loader = evaluation_loader = test_loader = loader
model = nn.Linear(10, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
inputs, targets = features[:4], labels[:4]
loss = torch.zeros((), requires_grad=True)
step, epoch, epochs = 0, 0, 1
"""


def run_page(items: list[dict[str, Any]]) -> list[str]:
    """The failures of a page's snippets."""
    failures: list[str] = []
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(PRELUDE, names)
    for item in items:
        if "file" in item:
            os.makedirs(os.path.dirname(item["file"]) or ".", exist_ok=True)
            with open(item["file"], "w", encoding="utf-8") as file:
                file.write(item["text"])
        else:
            failure = run_block(item, names)
            if failure:
                failures.append(f"{item['at']}:\n{item['code']}\n{failure}")
    return failures


def run_block(item: dict[str, Any], names: dict[str, Any]) -> str:
    """What is wrong with a snippet; nothing if it is empty."""
    if "Accelerator(" in item["code"] or "_launcher(" in item["code"]:  # a script of its own
        names["AcceleratorState"]._reset_state(reset_partial_state=True)
    printed = io.StringIO()
    try:
        exec(PRELUDE if item["setup"] == "fresh" else item["setup"], names)
        with contextlib.redirect_stdout(printed):
            exec(compile(item["code"], item["at"], "exec"), names)
    except BaseException as error:
        if item["raises"] is not None and re.search(item["raises"], str(error)):
            return ""
        return traceback.format_exc(limit=-3)
    if item["raises"] is not None:
        return f"does not raise {item['raises']!r}"
    if item["expected"] is not None and printed.getvalue().strip() != item["expected"].strip():
        return f"prints\n{printed.getvalue()}\nand the page says\n{item['expected']}"
    return ""


def main() -> None:
    work = json.load(sys.stdin)
    preload(IMPORTS)

    report = {}
    for page, items in work.items():
        if items:
            start = time.perf_counter()
            failures = forked(functools.partial(run_page, items), page)
            report[page] = {"seconds": time.perf_counter() - start, "blocks": len(items), "failures": failures}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
