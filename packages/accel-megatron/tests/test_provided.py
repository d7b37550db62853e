"""Models of custom_model_provider_function train like the mapped ones, and are saved under their own names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial
from typing import Any

import matrix
import pytest
import torch
from torch import nn

from accel_state.errors import ConfigurationError
from accel_state.testing import run_world

STEPS = 5


def provide(pre_process: bool, post_process: bool, config: Any, vp_stage: int | None = None) -> nn.Module:
    """GPT-2 of Megatron-core's own layers."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

    from accel_megatron.layers import Norm

    spec = get_gpt_layer_local_spec()
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = Norm  # for sequence parallelism
    count = get_num_layers_to_build(config, vp_stage=vp_stage)
    return GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[spec] * count, layer_norm=Norm),
        vocab_size=126,
        max_sequence_length=64,
        pre_process=pre_process,
        post_process=post_process,
        share_embeddings_and_output_weights=True,
        vp_stage=vp_stage,
    )


def with_weights(provider: Any, chunks: int = 1) -> Any:
    """A custom_prepare_model_function: the model with the weights of the reference."""
    from accel_megatron.architectures.registry import architecture_of
    from accel_megatron.weights import ParameterTable

    made = [provider(vp_stage=None if chunks == 1 else stage) for stage in range(chunks)]
    model = reference_model()
    state = model.state_dict()
    table = ParameterTable(made, list(architecture_of(model).weights()), torch.device("cpu"))
    table.load(lambda name: state[name], lambda parameter, value: parameter.data.copy_(value))
    return made[0] if chunks == 1 else made


def reference_model() -> Any:
    """GPT-2 with a vocabulary that two ranks can split."""
    model = matrix.create("gpt2")
    model.resize_token_embeddings(126)
    torch.manual_seed(2)
    model.transformer.wte.weight.data[125:] = 0.01
    return model.train()


def reference_losses(data: list[Any]) -> tuple[list[float], Any]:
    model = reference_model()
    optimizer = matrix.optimizer_of(model)
    scheduler = matrix.schedule_of(optimizer)
    losses = []
    for batch in data:
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


class Own:
    """Functions of a script that computes its own batches and losses."""

    @staticmethod
    def get_batch(iterator: Iterator[Any]) -> Any:
        batch = next(iterator)
        labels = batch["labels"]
        return batch["input_ids"], labels.clamp(min=0), (labels >= 0).float(), None, batch["position_ids"]

    @staticmethod
    def loss(loss_mask: torch.Tensor, output: torch.Tensor) -> Any:
        loss = (output.float() * loss_mask).sum() / loss_mask.sum()
        return loss, {"lm loss": loss.detach()}


VP = {"pp_degree": 2, "num_micro_batches": 4, "num_layers_per_virtual_pipeline_stage": 1}
OWN = {"custom_get_batch_function": Own.get_batch, "custom_loss_function": Own.loss}
CASES: list[dict[str, Any]] = [
    {"tp_degree": 2, "sequence_parallelism": True},
    {"pp_degree": 2, "num_micro_batches": 2},
    {**VP, "chunks": 2},
    {"use_distributed_optimizer": True, **OWN},
    {"use_custom_fsdp": True},
]


def train(cases: list[dict[str, Any]], directory: str) -> dict[str, Any]:
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    data = matrix.batches("gpt2", STEPS, 125)
    for batch in data[1:]:  # the means of micro batches are those of tokens
        batch["labels"] = torch.where(batch["labels"] < 0, batch["input_ids"], batch["labels"])
    custom = [{**batch, "labels": batch["input_ids"]} for batch in data]
    expected, plain = reference_losses(data)
    found: dict[str, Any] = {"losses": [], "names": []}
    for case in cases:
        case = dict(case)
        own = "custom_loss_function" in case
        chunks = case.pop("chunks", 1)
        run = matrix.Run(
            "gpt2",
            model=reference_model(),
            custom_model_provider_function=provide,
            custom_prepare_model_function=partial(with_weights, chunks=chunks),
            **case,
        )
        batches, goal = (custom, reference_losses(custom)[0]) if own else (data, expected)
        losses = [run.step(batch) for batch in batches[:3]]
        # What is saved after three steps continues with the same numbers, here and at other sizes.
        folder = f"{directory}/{sorted(case)[0]}"
        run.accelerator.save_state(folder)
        losses += [run.step(batch) for batch in batches[3:]]
        run.accelerator.load_state(folder)
        again = [run.step(batch) for batch in batches[3:]]
        found["losses"].append((matrix.worst(losses, goal), matrix.worst(again, goal[3:])))
        state = run.accelerator.get_state_dict(run.model)
        found["names"].append([*sorted(state)[:2], len(state)])
        if "tp_degree" in case:
            found["unwrapped"] = type(run.accelerator.unwrap_model(run.model)).__name__
        run.close()
    run = matrix.Run("gpt2", model=reference_model(), custom_model_provider_function=provide, **CASES[1])
    run.accelerator.load_state(f"{directory}/sequence_parallelism")
    found["elsewhere"] = matrix.worst([run.step(batch) for batch in data[3:]], expected[3:])
    run.model.eval()
    with torch.no_grad():
        found["eval"] = abs(float(run.model(**data[0]).loss) - float(plain.eval()(**data[0]).loss))
        mask = torch.ones_like(data[0]["input_ids"])
        mask[:, 24:] = 0
        masked = {"input_ids": data[0]["input_ids"], "attention_mask": mask}
        difference = run.model(**masked).logits - plain(**masked).logits
        found["logits"] = float(difference[:, :24].abs().max())
    tokens = run.model.megatron_generate(data[0]["input_ids"][:2, :8], max_new_tokens=6)
    plain.config.use_cache = True
    same = plain.generate(data[0]["input_ids"][:2, :8], max_new_tokens=6, do_sample=False, pad_token_id=0)
    found["generated"] = torch.equal(tokens.cpu(), same)
    run.close()
    return found


@pytest.mark.timeout(200)
def test_a_provided_model_trains_like_the_mapped_one(tmp_path: Any) -> None:
    for rank, found in enumerate(run_world(train, 2, CASES, str(tmp_path), timeout=180)):
        for case, (loss, again) in zip(CASES, found["losses"], strict=True):
            assert loss < 1e-5 and again < 1e-5, (rank, case, loss, again)
        assert found["elsewhere"] < 1e-5 and found["eval"] < 1e-5 and found["logits"] < 1e-4, found
        assert found["generated"] and found["unwrapped"] == "GPTModel", found
        for names in found["names"]:
            assert names == (
                ["decoder.final_layernorm.bias", "decoder.final_layernorm.weight", 52] if not rank else [0]
            )


class Classifier(nn.Module):
    """A model that is no language model: a tensor-parallel MLP on images."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

        self.config, self.share_embeddings_and_output_weights = config, False
        options = {"config": config, "init_method": config.init_method, "bias": True}
        self.hidden = ColumnParallelLinear(64, 32, gather_output=False, **options)
        options["skip_bias_add"] = False
        self.output = RowParallelLinear(32, 10, input_is_parallel=True, **options)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def set_input_tensor(self, tensor: Any) -> None:
        """There is one stage."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.output(torch.relu(self.hidden(images)[0]))[0]


def images_of(iterator: Iterator[Any]) -> Any:
    batch = next(iterator)
    return batch["image"], batch["digit"]


def train_a_classifier(directory: str) -> dict[str, Any]:
    from accel import Accelerator
    from accel_megatron import GPTTrainStep, MegatronLMPlugin, transformer_config
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()

    class Step(GPTTrainStep):
        def get_loss_func(self) -> Any:  # type: ignore[override]
            def loss_func(digits: torch.Tensor, output: torch.Tensor) -> Any:
                loss = nn.functional.cross_entropy(output, digits)
                return loss, {"loss": loss.detach()}

            return loss_func

        def get_forward_step_func(self) -> Any:
            def forward_step(iterator: Any, model: Any) -> Any:
                images, digits = self.get_batch(iterator)
                return model(images), partial(self.loss_func, digits)

            return forward_step

    generator = torch.Generator().manual_seed(1)
    images = torch.rand(64, 64, generator=generator)
    labels = torch.randint(0, 10, (64,), generator=generator)

    def classifier(pre_process: bool = True, post_process: bool = True) -> Any:
        return Classifier(transformer_config(num_layers=1, hidden_size=64, num_attention_heads=2))

    stand_in = nn.Linear(1, 1)
    plugin = MegatronLMPlugin(
        tp_degree=2,
        num_micro_batches=2,
        gradient_clipping=0,
        custom_model_provider_function=classifier,
        custom_get_batch_function=images_of,
        custom_train_step_class=Step,
    )
    accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
    optimizer = torch.optim.AdamW(stand_in.parameters(), lr=1e-2)
    model, optimizer = accelerator.prepare(stand_in, optimizer)
    state = accelerator.get_state_dict(model)
    found: dict[str, Any] = {"names": {name: tuple(value.shape) for name, value in state.items()}}
    everyone: list[Any] = [state]
    torch.distributed.broadcast_object_list(everyone, 0)
    plain = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    first = {
        name: torch.cat(list(value)) if name.startswith("hidden") else value for name, value in everyone[0].items()
    }
    first["output.weight"] = torch.cat(list(first["output.weight"]), 1)
    names = {"0": "hidden", "2": "output"}
    plain.load_state_dict({key: first[f"{names[key[0]]}{key[1:]}"] for key in plain.state_dict()})
    own = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    differences = []
    for _ in range(4):
        loss = model(image=images, digit=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        expected = nn.functional.cross_entropy(plain(images), labels)
        expected.backward()
        own.step()
        own.zero_grad()
        differences.append(abs(float(loss) - float(expected)))
    found["loss"] = max(differences)
    accelerator.save_state(directory)
    model.eval()
    with torch.no_grad():
        found["eval"] = abs(
            float(model(image=images, digit=labels).loss) - float(nn.functional.cross_entropy(plain(images), labels))
        )
    accelerator.load_state(directory)
    found["calls"] = int(accelerator.unwrap_model(model).calls)
    model.train()
    try:
        model(image=images[:63], digit=labels[:63])
    except ConfigurationError as error:
        found["odd"] = str(error)
    matrix.close(accelerator)
    return found


def test_a_model_that_is_no_language_model(tmp_path: Any) -> None:
    shapes = {"calls": (), "hidden.bias": (2, 16), "hidden.weight": (2, 16, 64)}
    shapes |= {"output.bias": (10,), "output.weight": (2, 10, 16)}
    for rank, found in enumerate(run_world(train_a_classifier, 2, str(tmp_path))):
        assert found["names"] == ({} if rank else shapes)
        assert found["loss"] < 1e-6 and found["eval"] < 1e-6, found
        assert found["calls"] == 8, found  # saved after 4 steps of 2 micro batches
        assert "63 samples cannot be split into num_micro_batches=2" in found["odd"]


def refusals() -> list[str]:
    from accel import Accelerator
    from accel_megatron import MegatronLMPlugin, transformer_config
    from accel_megatron.testing import cuda_on_cpu

    cuda_on_cpu()
    messages = []

    def other_sizes() -> Any:
        return Classifier(
            transformer_config(num_layers=1, hidden_size=64, num_attention_heads=2, context_parallel_size=2)
        )

    def classifier() -> Any:
        return Classifier(transformer_config(num_layers=1, hidden_size=64, num_attention_heads=2))

    for provider, more in (
        (other_sizes, {}),
        (classifier, {}),
        (lambda: nn.Linear(2, 2), {}),
        (classifier, {"encoder_seq_length": 8}),
        (classifier, {"pp_degree": 2, "num_layers_per_virtual_pipeline_stage": 1, "tp_degree": 1}),
        (provide, {"custom_prepare_model_function": lambda provider: [provider(), provider()]}),
        (provide, {"groups": 3}),
    ):
        groups = more.pop("groups", 1)
        plugin = MegatronLMPlugin(**{"tp_degree": 2, **more, "custom_model_provider_function": provider})
        accelerator = Accelerator(cpu=True, megatron_lm_plugin=plugin)
        model = reference_model() if provider is provide else nn.Linear(1, 3)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW([{"params": parameters[index::groups]} for index in range(groups)])
        try:
            accelerator.prepare(model, optimizer)
            messages.append("no error")
        except ConfigurationError as error:
            messages.append(str(error))
        matrix.close(accelerator)
    return messages


EXPECTED = [
    "built a model for other settings: context_parallel_size=2 .here: 1.*accel_megatron.transformer_config",
    "built a Classifier, and only a GPTModel or a MambaModel.*Set custom_train_step_class",
    "returned a Linear. Return a model of Megatron-core",
    "encoder_seq_length=8: the lengths of a model of custom_model_provider_function",
    "needs a num_layers that is a multiple of 2, not None",
    "returned 2 parts of the model, and this rank has 1",
    "the optimizer has 3 groups.*one with and one without weight_decay",
]


def test_refusals() -> None:
    for messages in run_world(refusals, 2):
        for message, expected in zip(messages, EXPECTED, strict=True):
            assert re.search(expected, message), (message, expected)
