"""Runs the snippets of a page, all in one namespace.

Names that pages use without defining them (``model``, ``loader``, ...) exist before the first snippet.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import tempfile
import traceback
from pathlib import Path
from typing import Any

PRELUDE = """
import os
import torch
import torch.optim.lr_scheduler
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from accel import *
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


def run_page(items: list[dict[str, Any]], folder: Path) -> list[str]:
    """Run a page's snippets in a new directory in a folder, and return their failures."""
    os.chdir(tempfile.mkdtemp(dir=folder))
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
