"""Prove flex_attention when the ranks start, and choose it for models without sdpa: Gemma-2, gpt-oss and others.

It is the attention of a start whose predecessor on this GPU has proven it (model/attention.py): that is then planned
with it, and documents share rows. The first start is planned for eager, whose scores hold more, and goes on with
flex_attention where the proof holds.
"""

import copy
import functools
import time

import torch

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.job.settings import Decision, withdraw
from zerofit.job.technique import Technique
from zerofit.model import attention, load, prove
from zerofit.model.experimental import flex_proof

FLAG = f"--attn_implementation {flex_proof.NAME}"


def follow_first_rank(settings) -> None:
    """Take the attention that rank 0 has chosen: a proof is kept on each node, and may be on some only. Collective."""
    if settings.use_cpu:
        return
    own = settings.attn_implementation, settings.padding_free
    first = distributed.broadcast(own)
    if not _is_asked(settings) and {own[0], first[0]} == {flex_proof.NAME, "eager"}:
        settings.attn_implementation, settings.padding_free = first


def prove_on_ranks(settings, config) -> None:
    """Compare flex_attention with eager on this GPU, before the model is loaded. Collective.

    Where nobody asked for it, it replaces eager if it is right, and eager replaces it if it is not, with a line.
    Args: config: the model's.
    Raises: UserError for a failure where --attn_implementation flex_attention or --packing was given, or after which
        the GPU computes nothing more.
    """
    if not _is_to_prove(settings, config):
        return
    flex_proof.compile_all_lengths()
    began = time.monotonic()
    layers = flex_proof.layers_of(load.check_model(settings, copy.deepcopy(config)))
    if not layers and _is_asked(settings):
        settings.decisions.append("flex_attention is not proven: the model's attention is not one that the proof knows")
        return
    compute = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[settings.precision]
    under_autocast = settings.keeps_fp32 and compute != torch.float32
    dtypes = flex_proof.Dtypes(compute, getattr(torch, load.weight_dtype(settings)), under_autocast)
    find = functools.partial(flex_proof.problem, layers, dtypes, torch.device("cuda"))
    why = prove.problem(find, FLAG, "use eager")
    if distributed.rank() == 0:
        prove.remember([flex_proof.file(settings, config, torch.cuda.get_device_name())], why is None)
    if why is None:
        _take(settings, time.monotonic() - began)
    elif _is_asked(settings):
        raise UserError(f"{FLAG}: {why}; leave it out.")
    else:
        _leave(settings, why)


def _is_asked(settings) -> bool:
    return "attn_implementation" in settings.given


def _is_to_prove(settings, config) -> bool:
    """Return whether flex_attention is the attention of this run, or may replace the eager that was chosen for it."""
    if settings.use_cpu or settings.attn_implementation != "eager":
        return not settings.use_cpu and settings.attn_implementation == flex_proof.NAME
    return not _is_asked(settings) and attention.has_only_flex(config) and not attention.why_not_flex(settings, config)


def _take(settings, seconds: float) -> None:
    """Train with flex_attention, which is proven."""
    proven = f"computes here what eager does, with gradients (proven in {seconds:.0f} s)"
    if settings.attn_implementation == flex_proof.NAME:
        settings.decisions.append(f"flex_attention {proven}")
        return
    _say_instead(
        settings,
        f"attn_implementation {flex_proof.NAME}: {proven}; this start is planned and padded as for eager, the next one "
        "as for flex_attention (off: --attn_implementation eager)",
    )
    settings.attn_implementation = flex_proof.NAME


def _leave(settings, why: str) -> None:
    """Train with eager, as the proof has failed. Raises: UserError for packed rows, which eager would mix."""
    was_planned = settings.attn_implementation == flex_proof.NAME
    if settings.packing:
        raise UserError(f"--packing: it needs flex_attention for this model, and {why}; train without --packing.")
    added = "; the plan has not counted its scores of S x S tokens, those of later starts will" if was_planned else ""
    withdraw(settings, "padding_free")
    _say_instead(settings, f"attn_implementation eager: flex_attention failed its proof: {why}; rows are padded{added}")
    settings.attn_implementation, settings.padding_free = "eager", False


def _say_instead(settings, sentence: str) -> None:
    withdraw(settings, "attn_implementation")
    settings.decisions.append(Decision(sentence, "attn_implementation"))


TECHNIQUE = Technique(name="flex_attention", self_test=prove_on_ranks)
