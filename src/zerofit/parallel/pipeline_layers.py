"""Cut a model into stages for DeepSpeed's PipelineModule; load and save each stage's weights by name.

The full model is built on the meta device, without memory. A stage copies its modules and reads their weights from the
safetensors files, tensor by tensor. Hidden states and position ids pass between the stages; documents of a packed row
begin at position 0.
"""

import contextlib
import copy
import io
import itertools
import json
from pathlib import Path

import torch
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec  # import this module after distributed.start
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, GenerationConfig, set_seed

from zerofit.base import distributed
from zerofit.model import attention, gradient_checkpointing, load
from zerofit.model.weights import complete, finite, stored

EMBEDDING, NORM, HEAD = "model.embed_tokens", "model.norm", "lm_head"


class Positions:
    """Arguments of decoder layers that follow from the position ids, computed once per micro batch."""

    def __init__(self, rotary):
        self.rotary, self.positions, self.derived = rotary, None, {}

    def arguments(self, hidden: torch.Tensor, positions: torch.Tensor) -> dict:
        """Return the arguments of a decoder layer: rotary embeddings and, for a single row, document bounds."""
        if positions is not self.positions:
            self.positions, self.derived = positions, {"position_embeddings": self.rotary(hidden, positions)}
            if len(positions) == 1:
                starts = (positions[0] == 0).nonzero()[:, 0]
                bounds = torch.nn.functional.pad(starts, (0, 1), value=positions.shape[1]).int()
                longest = int(bounds.diff().max())
                self.derived |= {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds}
                self.derived |= {"max_length_q": longest, "max_length_k": longest}
        return self.derived


class Part(torch.nn.Module):
    """A module of the model, initially without weights. Args: name: its name in the model."""

    def __init__(self, model, name: str, device):
        super().__init__()
        self.name = name
        module = copy.deepcopy(model.get_submodule(name))
        assert not list(module.buffers()), f"{name} has buffers, which the files of weights do not hold"
        self.add_module(name.rpartition(".")[2], module.to_empty(device=device))

    @property
    def inner(self) -> torch.nn.Module:
        return self.get_submodule(self.name.rpartition(".")[2])

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return the parameters by their names in the model."""
        return {f"{self.name}.{name}": parameter for name, parameter in self.inner.named_parameters()}


class Embedding(Part):
    def forward(self, inputs):
        ids, positions = inputs
        return self.inner(ids), positions


class Layer(Part):
    def __init__(self, model, name: str, device, positions: Positions):
        super().__init__(model, name, device)
        self.positions = positions

    def forward(self, inputs):
        hidden, positions = inputs
        more = self.positions.arguments(hidden, positions)
        return self.inner(hidden, attention_mask=None, position_ids=positions, **more), positions


class Norm(Part):
    def forward(self, inputs):
        return self.inner(inputs[0])


class Head(Part):
    """Return the hidden states unchanged: the loss function multiplies them by the head's weight."""

    def forward(self, hidden):
        return hidden


class Pipeline(PipelineModule):
    """The stage of this rank; config, architecture, shapes by name and numel describe the full model."""

    accepts_loss_kwargs = True  # makes transformers count the supervised tokens of a step
    loss_type = "ForCausalLM"  # ... with labels shifted by one

    def __init__(self, model, stages: int, device):
        def part(kind, name, *more):
            return LayerSpec(kind, model, name, device, *more)

        def shared(**more):
            weight = "embed_tokens.weight"
            return TiedLayerSpec("embedding", Embedding, model, EMBEDDING, device, tied_weight_attr=weight, **more)

        tied = model.config.tie_word_embeddings
        positions = Positions(type(model.model.rotary_emb)(config=model.config).to(device))
        layers = [part(Layer, f"model.layers.{i}", positions) for i in range(len(model.model.layers))]
        first, last = part(Embedding, EMBEDDING), part(Head, HEAD)
        if tied:
            first, last = shared(), shared(forward_fn=lambda _, hidden: hidden)
        with contextlib.redirect_stdout(io.StringIO()):  # rank 0 would print a line per layer
            super().__init__(
                [first, *layers, part(Norm, NORM), last],
                num_stages=stages,
                partition_method="parameters",
                dynamic_shape=True,  # batches differ in width
            )
        self.config, self.architecture = model.config, type(model).__name__
        self.generation_config = model.generation_config
        weights = {name: weight for name, weight in model.named_parameters() if not (tied and name == f"{HEAD}.weight")}
        self.shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        self.numel = sum(weight.numel() for weight in weights.values())

    def named_weights(self) -> dict[str, torch.nn.Parameter]:
        """Return the weights of this rank's parts by their names in the model, without duplicates of tied parts."""
        parts = (module for module in self.modules() if isinstance(module, Part))
        return {name: weight for part in parts for name, weight in part.named_weights().items()}

    def head_weight(self) -> torch.nn.Parameter:
        """Return the weight of the head on the last stage."""
        return self.named_weights()[f"{EMBEDDING if self.config.tie_word_embeddings else HEAD}.weight"]

    def layers_per_stage(self) -> str:
        """Return the numbers of layers of the stages: "4 + 4 layers"."""
        layers = range(1, self.config.num_hidden_layers + 1)  # 0 is the embedding
        counts = [len(set(layers) & set(range(*bounds))) for bounds in itertools.pairwise(self.parts)]
        return f"{' + '.join(map(str, counts))} layers"


def build(settings, tokenizer) -> Pipeline:
    """Return this rank's stage of the model with its weights, cache off. Collective.

    Raises: UserError for a model that cannot be found, read or split.
    """
    set_seed(settings.seed)
    attention.avoid_wrong_kernels()
    folder, config = load.weight_files(settings), load.load_config(settings)
    load.check_vocabulary(settings, tokenizer, config)
    dtype = getattr(torch, load.weight_dtype(settings))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation=settings.attn_implementation, dtype=dtype)
    config = model.config
    config.architectures, config.dtype, config.use_cache = [type(model).__name__], dtype, False
    if config.pad_token_id is None:  # after the build: padding_idx would freeze its embedding
        config.pad_token_id = tokenizer.pad_token_id
    if (folder / "generation_config.json").exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    gradient_checkpointing.enable(settings, model)
    device = torch.device("cpu") if settings.use_cpu else torch.device("cuda", torch.cuda.current_device())
    pipeline = Pipeline(model, settings.pp_size, device)
    _read_weights(pipeline, folder, settings)
    settings.decisions.append(f"pipeline stages: {pipeline.layers_per_stage()}, balanced by parameters")
    return pipeline


@torch.no_grad()
def _read_weights(pipeline: Pipeline, folder: Path, settings) -> None:
    """Read the weights of this rank's parts. Raises: UserError if a weight of any stage is missing or mismatched."""
    weights = stored.Weights(folder)
    shapes, held = pipeline.shapes, weights.where.keys()  # all stages, so that all ranks raise together
    names = complete.Names(
        total=len(shapes),
        missing=tuple(sorted(shapes.keys() - held)),
        mismatched=tuple(
            (name, stored_shape, list(shape))
            for name, shape in shapes.items()
            if name in held and (stored_shape := list(weights.shape(name))) != list(shape)
        ),
        unexpected=tuple(sorted(held - shapes.keys() - {f"{HEAD}.weight"})),  # a tied head may be saved as well
        loaded_as=pipeline.architecture,
    )
    load.certify(settings, folder, names)
    for name, parameter in pipeline.named_weights().items():
        parameter.copy_(weights.get(name))
    finite.check(pipeline.named_weights(), f"--model {settings.model}")


def save(pipeline: Pipeline, folder: Path, tokenizer) -> None:
    """Write a Hugging Face folder: each stage's first rank its weights, rank 0 the rest. Collective."""
    folder.mkdir(parents=True, exist_ok=True)
    stage, stages = pipeline.stage_id, pipeline.num_stages
    file, weights = f"model-{stage + 1:05}-of-{stages:05}.safetensors", {}
    if pipeline.mpu().get_data_parallel_rank() == 0:
        weights = pipeline.named_weights()
        if stage > 0:
            weights.pop(f"{EMBEDDING}.weight", None)  # stage 0 saves the weight of a tied head
        save_file({name: w.detach().contiguous() for name, w in weights.items()}, folder / file, {"format": "pt"})
    written = distributed.all_gather((file, list(weights), sum(w.nbytes for w in weights.values())))
    if distributed.rank() != 0:
        return
    weight_map = {name: file for file, names, _ in written for name in names}
    metadata = {"total_size": sum(size for _, _, size in written), "total_parameters": pipeline.numel}
    index = {"metadata": metadata, "weight_map": dict(sorted(weight_map.items()))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    pipeline.config.save_pretrained(folder)
    pipeline.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
