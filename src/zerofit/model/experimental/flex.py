"""Self-test flex_attention when the ranks start, and choose it for models without sdpa: Gemma-2, gpt-oss and others.

If an earlier start on this GPU passed the self-test, a start is planned with flex_attention, and documents share rows
(model/attention.py). The first start is planned for eager, whose scores take more memory, and continues with
flex_attention if the self-test passes.
"""

import copy
import functools
import time

import torch

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.job.settings import Decision, withdraw
from zerofit.job.technique import Technique
from zerofit.model import attention, load, self_test
from zerofit.model.experimental import flex_self_test

FLAG = f"--attn_implementation {flex_self_test.NAME}"


def follow_first_rank(settings) -> None:
    """Use the attention that rank 0 has chosen: results are stored on each node, so nodes may differ. Collective."""
    if settings.use_cpu:
        return
    local = settings.attn_implementation, settings.padding_free
    first = distributed.broadcast(local)
    if not _is_explicit(settings) and {local[0], first[0]} == {flex_self_test.NAME, "eager"}:
        settings.attn_implementation, settings.padding_free = first


def self_test_on_ranks(settings, config) -> None:
    """Compare flex_attention with eager on this GPU, before the model is loaded. Collective.

    If the attention was not set explicitly, flex_attention replaces eager after a pass, and eager replaces it after a
    failure, with a decision.
    Args: config: the model's.
    Raises: UserError for a failure if --attn_implementation flex_attention or --packing was set, or if the GPU is
        unusable afterwards.
    """
    if not _needs_self_test(settings, config):
        return
    flex_self_test.compile_all_lengths()
    began = time.monotonic()
    layers = flex_self_test.layers_of(load.check_model(settings, copy.deepcopy(config)))
    if not layers and _is_explicit(settings):
        settings.decisions.append("flex_attention: the self-test was skipped, it does not cover the model's attention")
        return
    compute = load.DTYPES[settings.compute_dtype]
    under_autocast = settings.keeps_fp32 and settings.precision != "fp32"
    dtypes = flex_self_test.Dtypes(compute, getattr(torch, load.weight_dtype(settings)), under_autocast)
    compare = functools.partial(flex_self_test.problem, layers, dtypes, torch.device("cuda"))
    why = self_test.run(compare, FLAG, "use eager")
    if distributed.rank() == 0:
        self_test.store_result(
            [flex_self_test.result_file(settings, config, torch.cuda.get_device_name())], why is None
        )
    if why is None:
        _use_flex(settings, time.monotonic() - began)
    elif _is_explicit(settings):
        raise UserError(f"{FLAG}: {why}; leave it out.")
    else:
        _fall_back(settings, why)


def _is_explicit(settings) -> bool:
    return "attn_implementation" in settings.explicit


def _needs_self_test(settings, config) -> bool:
    """Return whether flex_attention is the attention of this run, or may replace the eager that was chosen for it."""
    if settings.use_cpu or settings.attn_implementation != "eager":
        return not settings.use_cpu and settings.attn_implementation == flex_self_test.NAME
    is_open = not _is_explicit(settings) and attention.has_only_flex(config)
    return is_open and not attention.why_not_flex(settings, config)


def _use_flex(settings, seconds: float) -> None:
    """Train with flex_attention after a passed self-test."""
    passed = f"matches eager on this GPU, with gradients (self-test: {seconds:.0f} s)"
    if settings.attn_implementation == flex_self_test.NAME:
        settings.decisions.append(f"flex_attention {passed}")
        return
    _replace_decision(
        settings,
        f"attn_implementation {flex_self_test.NAME}: {passed}; this start is planned and padded for eager, the next "
        "one for flex_attention (off: --attn_implementation eager)",
    )
    settings.attn_implementation = flex_self_test.NAME


def _fall_back(settings, why: str) -> None:
    """Train with eager after a failed self-test. Raises: UserError for packed rows, which eager would mix."""
    was_planned = settings.attn_implementation == flex_self_test.NAME
    if settings.packing:
        raise UserError(f"--packing: it needs flex_attention for this model, and {why}; train without --packing.")
    added = "; the plan did not count its scores of S x S tokens, plans of later starts will" if was_planned else ""
    withdraw(settings, "padding_free")
    _replace_decision(
        settings, f"attn_implementation eager: flex_attention failed its self-test: {why}; rows are padded{added}"
    )
    settings.attn_implementation, settings.padding_free = "eager", False


def _replace_decision(settings, sentence: str) -> None:
    withdraw(settings, "attn_implementation")
    settings.decisions.append(Decision(sentence, "attn_implementation"))


TECHNIQUE = Technique(name="flex_attention", self_test=self_test_on_ranks)
