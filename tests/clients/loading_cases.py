"""from_pretrained with device maps, disk offload and quantization, and PEFT on such models."""

from __future__ import annotations

import copy
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import accelerate
import torch
from harness import Cases, StepClock, as_json, files, repeated, weights
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from tiny_models import MODELS, TOKENS, facts, load, saved, spread, used
from transformers import BitsAndBytesConfig

cases = Cases()


def add(name: str, model: str, worlds: tuple[int, ...] = (1,), **options: Any) -> None:
    def case(folder: Path) -> Any:
        path = saved(folder, model)
        given = {k: (v(path) if callable(v) else copy.deepcopy(v)) for k, v in options.items()}
        loaded = load(path, **given)
        result = {**facts(loaded), **used(loaded)}
        if not given.get("quantization_config"):
            loaded.save_pretrained(folder / "again")
            result["saved"] = weights(load(folder / "again").state_dict()) if model != "t5" else files(folder / "again")
        return result

    cases.add(name, case, worlds)


for _model in MODELS:
    add(f"plain_{_model}", _model, (1, 2))
    add(f"auto_{_model}", _model, (1, 2), device_map="auto")
    add(f"cpu_{_model}", _model, device_map={"": "cpu"})
    add(
        f"disk_all_{_model}",
        _model,
        device_map="auto",
        max_memory={"cpu": "120KB"},
        offload_folder=lambda path: str(path.parent / "offload"),
    )
    add(f"disk_alternate_{_model}", _model, device_map=spread, offload_folder=lambda path: str(path.parent / "offload"))
    add(
        f"sequential_memory_{_model}",
        _model,
        device_map="sequential",
        max_memory={"cpu": "300KB"},
        offload_folder=lambda path: str(path.parent / "offload"),
    )
    add(f"bf16_auto_{_model}", _model, device_map="auto", dtype=torch.bfloat16)
    add(
        f"bf16_disk_{_model}",
        _model,
        device_map="auto",
        dtype=torch.bfloat16,
        max_memory={"cpu": "100KB"},
        offload_folder=lambda path: str(path.parent / "offload"),
    )

EIGHT = BitsAndBytesConfig(load_in_8bit=True)
FOUR = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32)
DOUBLE = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.bfloat16)
for _model in ("llama", "gpt2", "t5"):
    for _bits, _config in (("eight", EIGHT), ("four", FOUR), ("four_double", DOUBLE)):
        add(
            f"{_bits}_auto_{_model}",
            _model,
            (1, 2) if _model == "llama" else (1,),
            device_map="auto",
            quantization_config=_config,
        )
        add(f"{_bits}_{_model}", _model, quantization_config=_config, dtype=torch.float32)
        add(f"{_bits}_cpu_{_model}", _model, device_map={"": "cpu"}, quantization_config=_config)


def lora(model: Any, **options: Any) -> Any:
    torch.manual_seed(7)
    targets = (
        ["q", "v"]
        if model.config.model_type == "t5"
        else ["c_attn"]
        if model.config.model_type == "gpt2"
        else ["q_proj", "v_proj"]
    )
    kind = "SEQ_2_SEQ_LM" if model.config.model_type == "t5" else "CAUSAL_LM"
    return get_peft_model(
        model, LoraConfig(r=4, target_modules=targets, task_type=kind, init_lora_weights=False, **options)
    )


def steps(model: Any, count: int = 5) -> list[float]:
    """A few steps of training."""
    torch.manual_seed(3)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    clock = StepClock()
    model.train()
    for _ in repeated(count):
        loss = model(input_ids=TOKENS, labels=TOKENS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        clock()
    return losses


def _peft(
    model: str, load_again: dict[str, Any] | None = None, kbit: bool = False, train: bool = True, **options: Any
) -> Any:
    def case(folder: Path) -> Any:
        path = saved(folder, model)
        given = {k: (v(path) if callable(v) else copy.deepcopy(v)) for k, v in options.items()}
        base = load(path, **given)
        if kbit:
            base = prepare_model_for_kbit_training(base)
        tuned = lora(base)
        losses = steps(tuned) if train else []
        tuned.eval()
        before = tuned(input_ids=TOKENS, labels=TOKENS).logits.detach()
        tuned.save_pretrained(folder / "adapter")
        adapter = {name: p for name, p in tuned.named_parameters() if "lora" in name and not p.is_meta}
        again_options = {k: (v(path) if callable(v) else copy.deepcopy(v)) for k, v in (load_again or options).items()}
        base = load(path, **again_options)
        peft_options = {k: v for k, v in again_options.items() if k in ("max_memory",)}
        if "offload_folder" in again_options:
            peft_options["offload_folder"] = str(folder / "adapter_offload")
        again = PeftModel.from_pretrained(base, folder / "adapter", **peft_options).eval()
        with torch.no_grad():
            after = again(input_ids=TOKENS, labels=TOKENS).logits
        return {
            "losses": losses, "before": before, "after": after,
            "same": torch.allclose(before.float(), after.float(), atol=1e-5),
            "adapter": weights(adapter), "map": facts(again)["map"], "files": files(folder / "adapter"),
        }  # fmt: skip

    return case


DISK = {
    "device_map": "auto",
    "max_memory": {"cpu": "250KB"},
    "offload_folder": lambda path: str(path.parent / "offload"),
}
ALTERNATE = {"device_map": spread, "offload_folder": lambda path: str(path.parent / "offload")}
for _model in ("llama", "gpt2", "t5"):
    cases.add(f"peft_plain_{_model}", _peft(_model), (1,))
    cases.add(f"peft_auto_{_model}", _peft(_model, device_map="auto"), (1, 2) if _model == "llama" else (1,))
    cases.add(f"peft_load_disk_{_model}", _peft(_model, load_again=DISK, train=True), (1,))
    cases.add(f"peft_load_alternate_{_model}", _peft(_model, load_again=ALTERNATE), (1,))
    cases.add(f"peft_on_alternate_{_model}", _peft(_model, train=False, **ALTERNATE), (1,))
    cases.add(f"peft_train_alternate_{_model}", _peft(_model, train=True, **ALTERNATE), (1,))
for _model in ("llama", "gpt2"):
    cases.add(f"peft_eight_{_model}", _peft(_model, kbit=True, quantization_config=EIGHT, device_map="auto"), (1, 2))
    cases.add(f"peft_four_{_model}", _peft(_model, kbit=True, quantization_config=FOUR, device_map="auto"), (1, 2))


@cases((1,))
def peft_merge_disk(folder: Path) -> Any:
    """An adapter is loaded onto a model with layers on the disk, and merged into it."""
    path = saved(folder, "llama")
    tuned = lora(load(path))
    tuned.save_pretrained(folder / "adapter")
    options = {k: (v(path) if callable(v) else v) for k, v in ALTERNATE.items()}
    with torch.no_grad():
        expected = tuned(input_ids=TOKENS).logits
        again = PeftModel.from_pretrained(
            load(path, **options), folder / "adapter", offload_folder=str(folder / "more")
        )
        before = again.eval()(input_ids=TOKENS).logits
        after = again.merge_and_unload()(input_ids=TOKENS).logits
    same = [torch.allclose(expected, logits, atol=1e-5) for logits in (before, after)]
    return {"before": before, "after": after, "equal to the model in memory": same}


@cases((1,))
def peft_merge_offloaded(folder: Path) -> Any:
    """An adapter is merged into a model whose layers are all offloaded; PEFT assigns the hooks' weights_map."""
    path = saved(folder, "llama")
    plain = lora(load(path)).eval()
    plain.save_pretrained(folder / "adapter")

    def from_disk() -> Any:
        base = load(path, device_map="auto", max_memory={"cpu": "120KB"}, offload_folder=str(folder / "base"))
        return PeftModel.from_pretrained(
            base, folder / "adapter", max_memory={"cpu": "120KB"}, offload_folder=str(folder / "more")
        ).eval()

    models = {
        "cpu": lambda: accelerate.cpu_offload(lora(load(path)).eval(), "cpu"),
        "disk": lambda: accelerate.disk_offload(lora(load(path)).eval(), folder / "weights", "cpu"),
        "dispatched": from_disk,
    }
    results: dict[str, Any] = {}
    with torch.no_grad():
        expected = plain(input_ids=TOKENS).logits
        for name, build in models.items():
            model = build()
            model(input_ids=TOKENS)  # layers are fetched ahead
            model.merge_adapter()
            merged = model(input_ids=TOKENS).logits
            model.unmerge_adapter()
            apart = model(input_ids=TOKENS).logits
            unloaded = model.merge_and_unload()(input_ids=TOKENS).logits
            results[name] = [torch.allclose(expected, logits, atol=1e-5) for logits in (merged, apart, unloaded)]
    return results


def peft_merge_files(quantization: BitsAndBytesConfig | None) -> Any:
    """An adapter is merged into the files of its base: by PEFT, and with accel by its command too."""

    def case(folder: Path) -> Any:
        base = folder / "base"
        load(saved(folder, "llama"), quantization_config=quantization, dtype=torch.float32).save_pretrained(base)
        lora(load(base)).save_pretrained(folder / "adapter")
        whole = load(base) if quantization is None else load(base).dequantize()
        expected = PeftModel.from_pretrained(whole, folder / "adapter").merge_and_unload().state_dict()
        found = expected
        if find_spec("accel") is not None:
            from accel.utils import merge_adapter_weights

            merge_adapter_weights(base, folder / "adapter", folder / "merged")
            found = load(folder / "merged").state_dict()
        assert found.keys() == expected.keys()
        return [name for name, value in found.items() if not torch.equal(value, expected[name])]

    return case


cases.add("peft_merge_files", peft_merge_files(None), (1,))
cases.add("peft_merge_files_of_4_bits", peft_merge_files(FOUR), (1,))


@cases((1,))
def peft_two_adapters(folder: Path) -> Any:
    path = saved(folder, "llama")
    tuned = lora(load(path, device_map="auto"))
    tuned.add_adapter("second", LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    outputs = []
    with torch.no_grad():
        for name in ("default", "second"):
            tuned.set_adapter(name)
            outputs.append(tuned(input_ids=TOKENS).logits)
        with tuned.disable_adapter():
            outputs.append(tuned(input_ids=TOKENS).logits)
    return outputs


@cases((1,))
def save_offloaded(folder: Path) -> Any:
    path = saved(folder, "llama")
    options = {k: (v(path) if callable(v) else v) for k, v in ALTERNATE.items()}
    model = load(path, **options)
    model.save_pretrained(folder / "again", max_shard_size="100KB")
    return {"files": files(folder / "again"), "weights": weights(load(folder / "again").state_dict())}


@cases((1,))
def resize_and_move(folder: Path) -> Any:
    """What users do with a dispatched model: move it, resize its embeddings."""
    path = saved(folder, "llama")
    model = load(path, device_map="auto")
    model.resize_token_embeddings(130, mean_resizing=False)
    result = {"embedding": model.get_input_embeddings().weight[:128].sum().item(), **used(model.to("cpu"))}
    offloaded = load(path, **{k: (v(path) if callable(v) else v) for k, v in ALTERNATE.items()})
    for name, action in {"to": lambda: offloaded.to("cpu"), "half": lambda: offloaded.to(torch.float16)}.items():
        try:
            result[name] = str(type(action()).__name__)
        except Exception as error:
            result[name] = type(error).__name__
    return result


@cases((1,))
def pipeline(folder: Path) -> Any:
    import transformers

    path = saved(folder, "gpt2")
    model = load(path, device_map="auto")
    return {
        "class": type(model).__name__,
        "dtype": str(model.dtype),
        "device": str(model.device),
        "map": facts(model)["map"],
        "version": bool(transformers.utils.is_accelerate_available()),
    }


@cases((1,))
def wrong_map(folder: Path) -> Any:
    """Which exception a client sees."""
    path = saved(folder, "llama")
    results = {}
    for name, options in {
        "no_folder": {"device_map": {"": "disk"}},
        "misses": {"device_map": {"model.embed_tokens": "cpu"}},
        "unknown_string": {"device_map": "nothing"},
        "unknown_key": {"device_map": {"": "cpu", "lm_heads": "cpu"}},
    }.items():
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                results[name] = as_json(used(load(path, **options)))
        except Exception as error:
            results[name] = next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")
    return results
