"""Compute the language-model loss without materializing the logits, in chunks of tokens.

A dense loss holds the logits of T tokens over a vocabulary of V three times in fp32: 12 T V bytes. Here the logits of
each chunk of rows are computed, turned into their gradient in place and immediately multiplied with the head. Only the
gradients of the hidden states (and of a trained head) are kept; the backward only scales them.

torch.nn.functional.linear_cross_entropy (torch 2.13) is similar, but rounds the loss of bf16 inputs to bf16 and
supports neither a soft cap nor a scale.
"""

import contextlib
import functools

import torch
from torch.autograd.function import once_differentiable

from zerofit.base import distributed
from zerofit.base.errors import UserError
from zerofit.base.limits import LARGE_VOCABULARY
from zerofit.job.settings import decide
from zerofit.job.technique import Conflict, Technique

CHUNK_BYTES = 2**30  # fp32 logits per chunk: 2,048 rows at V = 128k

IGNORED = -100

SMALL, LARGE = 2.0**-13, 2.0**20  # test logits far below and far above any soft cap


def rows_per_chunk(vocabulary: int) -> int:
    """Return the number of rows whose fp32 logits fit CHUNK_BYTES: 256 to 4096, a multiple of 64."""
    return max(256, min(4096, CHUNK_BYTES // (4 * vocabulary) // 64 * 64))


def linear_cross_entropy(hidden, weight, bias, labels, scale=1.0, softcap=None, rows=None, count=None):
    """Return the summed cross entropy of softcap(scale x (hidden weight' + bias)); skip label -100.

    Args: hidden: (tokens, features); weight: (vocabulary, features); bias: (vocabulary) or None; labels: (tokens);
        softcap: c of c tanh(x / c), or None; rows: tokens per chunk; count: number of labels other than -100, None to
        count them on the device and wait for the result (a wrong count gives NaN). Products have autocast's dtype.
    Returns: a scalar in fp32 (fp64 for fp64 inputs). Gradients are computed in the forward: backward runs only once.
    """
    rows = rows or rows_per_chunk(weight.shape[0])
    total = _Chunked.apply(
        hidden, weight, bias, labels, _labelled(labels, count), scale, softcap, rows, torch.is_grad_enabled()
    )
    return _unless_miscounted(total, labels, count)


def document_log_probs(hidden, weight, bias, labels, documents, number, scale=1.0, softcap=None, rows=None, count=None):
    """Return the summed log-probability of the labels of each document, (number,), in chunks like linear_cross_entropy.

    Args: documents: (tokens), the index of each token's document; number: number of documents; others: the same.
    """
    rows = rows or rows_per_chunk(weight.shape[0])
    total = _PerDocument.apply(
        hidden, weight, bias, labels, _labelled(labels, count), documents, number, scale, softcap, rows
    )
    return _unless_miscounted(total, labels, count)


def _labelled(labels, count: int | None):
    """Return the indices of the labels that are in the loss; without `count`, wait for the device."""
    mask = labels != IGNORED
    return (mask.nonzero() if count is None else mask.nonzero_static(size=count))[:, 0]


def _unless_miscounted(total, labels, count: int | None):
    """Return `total`, or NaN if `count` is not the number of labels, so that the step is not applied."""
    if count is None:
        return total
    return total * torch.where((labels != IGNORED).sum() == count, 1.0, torch.nan).to(total.dtype)  # gradients too


def dense_log_probs(logits, labels, documents, count):
    """Return the result of document_log_probs from the logits of a batch: (rows, tokens, vocabulary)."""
    targets = torch.nn.functional.pad(labels, (0, 1), value=IGNORED)[..., 1:].flatten()
    precise = torch.promote_types(logits.dtype, torch.float32)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, -2).to(precise), targets, reduction="none")
    # In fp64, because a GPU adds in a different order each time, and the sum must not depend on it.
    sums = losses.new_zeros(count, dtype=torch.float64).index_add(0, documents, -losses.double())
    return sums.to(losses.dtype)


class NotFused(Exception):
    """The reason why the loss of a model cannot be fused."""


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, labelled, scale, softcap, rows, training):
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        precise = torch.promote_types(dtype, torch.float32)
        ctx.dtypes = [None if t is None else t.dtype for t in (hidden, weight, bias)]
        ctx.gradients = [None, None, None]
        if training:
            # fp16 gradients are kept in fp32, because the loss scale is only applied in the backward.
            dtypes = (dtype, torch.promote_types(weight.dtype, dtype), precise)
            ctx.gradients = [
                torch.zeros(t.shape, dtype=precise if kind == torch.float16 else kind, device=t.device)
                if needed
                else None
                for t, kind, needed in zip((hidden, weight, bias), dtypes, ctx.needs_input_grad[:3], strict=True)
            ]
        total = torch.zeros((), dtype=precise, device=hidden.device)
        with torch.amp.autocast(device, enabled=False):
            matrix = weight.to(dtype)
            offset = None if bias is None else bias.to(dtype)
            for part in labelled.split(rows):
                states = hidden[part].to(dtype)
                total += _chunk(states, part, labels[part, None], matrix, offset, scale, softcap, ctx.gradients).sum()
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        if ctx.gradients is None:
            raise RuntimeError("the fused loss does not keep its graph: its backward has already run")
        gradients, ctx.gradients = ctx.gradients, None
        scaled = [
            None if g is None else g.mul_(upstream).to(dtype) for g, dtype in zip(gradients, ctx.dtypes, strict=True)
        ]
        return *scaled, *[None] * 6


class _PerDocument(torch.autograd.Function):
    """Log-probabilities summed by document. The weight of a document in the loss is only known in the backward, which
    computes the chunks again: one more product with the head, without storing the logits.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, labels, labelled, documents, number, scale, softcap, rows):
        device = hidden.device.type
        ctx.dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        ctx.form = scale, softcap, rows
        ctx.save_for_backward(hidden, weight, bias, labels, labelled, documents)
        precise = torch.promote_types(ctx.dtype, torch.float32)
        total = torch.zeros(number, dtype=torch.float64, device=hidden.device)  # as in dense_log_probs
        with torch.amp.autocast(device, enabled=False):
            for part, loss in _PerDocument._chunks(ctx, hidden, weight, bias, labels, labelled, (None, None, None)):
                total.index_add_(0, documents[part], -loss.double())
        return total.to(precise)

    @staticmethod
    @once_differentiable
    def backward(ctx, upstream):
        hidden, weight, bias, labels, labelled, documents = ctx.saved_tensors
        kinds = (ctx.dtype, torch.promote_types(weight.dtype, ctx.dtype), torch.promote_types(ctx.dtype, torch.float32))
        gradients = [
            torch.zeros(t.shape, dtype=kind, device=t.device) if needed else None
            for t, kind, needed in zip((hidden, weight, bias), kinds, ctx.needs_input_grad[:3], strict=True)
        ]
        for _ in _PerDocument._chunks(ctx, hidden, weight, bias, labels, labelled, gradients, -upstream[documents]):
            pass
        inputs = (hidden, weight, bias)
        return *(None if g is None else g.to(t.dtype) for g, t in zip(gradients, inputs, strict=True)), *[None] * 7

    @staticmethod
    def _chunks(ctx, hidden, weight, bias, labels, labelled, gradients, weights=None):
        """Yield (indices, losses) of each chunk of labelled tokens, and add its gradients to `gradients`."""
        scale, softcap, rows = ctx.form
        matrix, offset = weight.to(ctx.dtype), None if bias is None else bias.to(ctx.dtype)
        for part in labelled.split(rows):
            part_weights = None if weights is None else weights[part, None]
            states = hidden[part].to(ctx.dtype)
            target = labels[part, None]
            yield part, _chunk(states, part, target, matrix, offset, scale, softcap, gradients, part_weights)


def _chunk(hidden, part, target, weight, bias, scale, softcap, gradients, weights=None):
    """Return the losses of a chunk of rows, and add their gradients, times `weights`, to `gradients`."""
    training = any(g is not None for g in gradients)
    target = target.clamp(min=0)  # below 0 only if the count from the host is too large: the loss is NaN then
    products = hidden @ weight.t() if bias is None else torch.addmm(bias, hidden, weight.t())
    logits = products.to(torch.promote_types(products.dtype, torch.float32))  # the same tensor if already fp32
    slope = None
    if scale != 1:
        logits.mul_(scale)
    if softcap:
        logits.div_(softcap).tanh_()
        slope = logits.square().neg_().add_(1) if training else None
        logits.mul_(softcap)
    logits.sub_(logits.amax(-1, keepdim=True))
    loss = -logits.gather(1, target)[:, 0]
    sums = logits.exp_().sum(-1, keepdim=True)
    loss += sums.log()[:, 0]
    if not training:
        return loss
    logits.scatter_add_(1, target, -sums)
    if slope is not None:
        logits.mul_(slope)
    # (softmax - one hot) in the dtype of the products, as in the backward of the dense loss.
    gradient = torch.mul(logits, (scale if weights is None else scale * weights) / sums, out=products)
    d_hidden, d_weight, d_bias = gradients
    if d_hidden is not None:
        d_hidden[part] = _product(gradient, weight, d_hidden.dtype)
    if d_weight is not None:
        _add_product(d_weight, gradient.t(), hidden)
    if d_bias is not None:
        d_bias += gradient.sum(0, dtype=d_bias.dtype)
    return loss


def _product(a, b, dtype):
    """Return a b in `dtype`, without rounding or overflow for half-precision factors."""
    if a.dtype == dtype:
        return a @ b
    if a.device.type != "cpu":  # CUDA or a simulated GPU
        return torch.mm(a, b, out_dtype=dtype)
    return a.to(dtype) @ b.to(dtype)


def _add_product(total, a, b) -> None:
    """Add a b to `total`, in the dtype of `total`."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.device.type != "cpu":
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    elif a.dtype == torch.bfloat16:  # twice as fast as in fp32; each chunk is rounded once, like the dense gradient
        total.add_(a @ b)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def find_head(model) -> torch.nn.Linear:
    """Return the linear layer that computes the logits, or its trained copy with PEFT's modules_to_save.

    Raises: NotFused if it is not a plain linear layer (adapted, quantized ...).
    """
    head = model.get_output_embeddings()
    if hasattr(head, "modules_to_save"):
        head = head.modules_to_save[head.active_adapters[0]]
    if type(head) is not torch.nn.Linear:
        raise NotFused(f"the head of this model is a {type(head).__name__}, not a plain linear layer")
    return head


@functools.cache
def outputs_of_any_class() -> type:
    """Return a class for a backbone's output whose missing attributes (cache, router logits) are read as None."""
    from transformers.modeling_outputs import BaseModelOutput  # its import takes a second

    class Outputs(BaseModelOutput):
        def __getattr__(self, name):
            if name.startswith("_"):
                raise AttributeError(name)

    return Outputs


def logit_form(base, head) -> tuple[float, float | None]:
    """Return (scale, soft cap or None) of the model's logits, measured by its forward without layers.

    The layers return zeros, and the head returns test logits from -60 to 60; the loss function must receive cap
    tanh(scale x / cap). A second run with logits of width 0 must give the same loss, which shows that only the loss
    function reads them. Weights are not used, so the model may be on the meta device or sharded by ZeRO-3. (The keys of
    config.json are ambiguous: Granite divides by `logits_scaling`, HyperCLOVA X multiplies by it.)
    Raises: NotFused if the forward does anything else.
    """
    grid = torch.linspace(-60, 60, 2 * head.out_features, dtype=torch.float64).view(1, 2, -1)
    grid[0, 0, 0], grid[0, 0, 1] = SMALL, LARGE
    hidden, ids = torch.zeros(1, 2, head.in_features), torch.zeros(1, 2, dtype=torch.long)
    backbone = base.base_model
    if backbone is base:  # Llama-4 with images has a causal model inside
        backbone = getattr(base.get_decoder(), "model", base.get_decoder())
    dense_loss, received, values = base.loss_function, [], []

    def record(logits, labels, vocab_size, **kwargs):
        received.append(logits)
        values.append(values[0] if values else dense_loss(logits, labels, vocab_size, **kwargs))
        if vocab_size != head.out_features:
            raise NotFused("this model truncates its logits before the loss")
        return values[-1]

    if getattr(dense_loss, "__name__", "") != "ForCausalLMLoss":
        raise NotFused("this model's loss is not transformers' ForCausalLMLoss")
    inputs = {"input_ids": ids, "labels": ids, "use_cache": False}
    if hasattr(base.config, "output_router_logits"):
        inputs["output_router_logits"] = False  # the replaced layers return no router logits; RouterLoss adds the loss
    losses, base.loss_function = [], record
    try:
        with attribute(backbone, "forward", lambda *_, **__: outputs_of_any_class()(last_hidden_state=hidden)):
            for logits in (grid, grid[..., :0]):
                with attribute(head, "forward", lambda _, logits=logits: logits.clone()), torch.no_grad():
                    losses.append(float(base.forward(**inputs).loss))
    except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError) as error:
        raise NotFused(f"this model's forward needs its logits ({error})") from None
    finally:
        base.loss_function = dense_loss
    if len(received) != 2 or losses[0] != losses[1]:
        raise NotFused("this model computes a part of its loss outside of its loss function")
    scale, at_large = received[0][0, 0, 0].item() / SMALL, received[0][0, 0, 1].item()
    scale = 1.0 if abs(scale - 1) < 1e-6 else scale
    softcap = at_large if at_large < 0.5 * scale * LARGE else None
    expected = torch.tanh(grid * scale / softcap) * softcap if softcap else grid * scale
    if not torch.allclose(received[0].double(), expected, rtol=1e-5, atol=1e-5):
        raise NotFused("this model transforms its logits by more than a scale and a soft cap")
    return scale, softcap


@contextlib.contextmanager
def attribute(module, name, value):
    """Context in which the instance attribute `module.name` is `value`."""
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)
        else:
            setattr(module, name, before)


class FusedLoss:
    """Compute the loss without logits inside `with fused.on():`; otherwise the model is unchanged.

    The model's forward is not changed. The head stores the hidden states and returns logits of width 0; the loss
    function then calls the head again, with the labels, to get the loss. This second call is a module call too, so that
    ZeRO-3 gathers the weight and reduces its gradient. Parameters, state_dict and saving are unchanged.
    Raises: NotFused for a model whose loss cannot be fused.
    """

    def __init__(self, model, rows: int | None = None):
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        self.head, self.rows = find_head(base), rows
        self.scale, self.softcap = logit_form(base, self.head)
        self.dense_head, self.dense_loss = self.head.forward, base.loss_function
        self.active, self.hidden, self.documents, self.count = False, None, None, None
        self.head.forward, base.loss_function = self._head, self._loss

    @contextlib.contextmanager
    def on(self, documents=None, count=None):
        """Context in which the model computes its loss without logits.

        Args: documents: (index of each token's document, their number): the loss is then a vector, the summed
            log-probability of each document, default: a mean over tokens; count: see linear_cross_entropy.
        """
        self.active, self.documents, self.count = True, documents, count
        try:
            yield
        finally:
            self.active, self.hidden, self.documents, self.count = False, None, None, None

    def _head(self, hidden, labels=None):
        if labels is not None:
            tokens = hidden.reshape(-1, hidden.shape[-1])
            weights, form = (self.head.weight, self.head.bias), (self.scale, self.softcap, self.rows)
            if self.documents is not None:
                return document_log_probs(tokens, *weights, labels.reshape(-1), *self.documents, *form, self.count)
            return linear_cross_entropy(tokens, *weights, labels.reshape(-1), *form, self.count)
        if not self.active:
            return self.dense_head(hidden)
        self.hidden = hidden
        return hidden.new_empty(*hidden.shape[:-1], 0)

    def _loss(self, logits, labels, vocab_size, num_items_in_batch=None, ignore_index=IGNORED, **kwargs):
        """Compute transformers' ForCausalLMLoss; without any label the result is 0, not NaN as for the dense mean."""
        if self.hidden is None:
            return self.dense_loss(
                logits, labels, vocab_size, num_items_in_batch=num_items_in_batch, ignore_index=ignore_index, **kwargs
            )
        hidden, self.hidden = self.hidden, None
        targets = kwargs.get("shift_labels")
        if targets is None:
            targets = torch.nn.functional.pad(labels, (0, 1), value=ignore_index)[..., 1:]
        assert ignore_index == IGNORED and targets.shape == hidden.shape[:-1]
        targets = targets.to(hidden.device)
        total = self.head(hidden, labels=targets)
        if self.documents is not None:
            return total
        if num_items_in_batch is None:
            return total / (targets != IGNORED).sum().clamp(min=1)
        return total / torch.as_tensor(num_items_in_batch, device=total.device)


class RouterLoss:
    """Load-balancing loss of a mixture of experts, added to the training loss outside of the model.

    transformers' models add coefficient x loss to every micro batch, so it counts accumulation x ranks times, also in
    evaluation. Here the coefficient in the model is set to 0 (config.json keeps it), and the term of each micro batch
    is weighted like its cross entropy, by supervised tokens.
    """

    def __init__(self, model):
        """Raise UserError if the model has neither router_aux_loss_coef nor aux_loss_coef."""
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # PEFT
        name = next((n for n in ("router_aux_loss_coef", "aux_loss_coef") if hasattr(base, n)), None)
        if name is None:
            raise UserError(
                f"config.json: output_router_logits is true, but {type(base).__name__} does not have a router loss "
                "with a coefficient (router_aux_loss_coef); set output_router_logits to false."
            )
        self.coefficient = getattr(base, name)
        setattr(base, name, 0.0)

    def share(self, outputs, supervised, num_items_in_batch) -> torch.Tensor:
        """Return a micro batch's router loss times its share of `num_items_in_batch`, supervised tokens or pairs."""
        return self.coefficient * outputs.aux_loss * (supervised / num_items_in_batch)


def router_loss(model) -> RouterLoss | None:
    """Return the RouterLoss of a model with output_router_logits in config.json, or None."""
    config = model.config.get_text_config()
    return RouterLoss(model) if getattr(config, "output_router_logits", False) else None


def resolve_for_model(settings, config) -> None:
    """Decide `--fused_loss auto` from the model's vocabulary and conflicting flags.

    Raises: UserError for a configuration without a vocabulary, such as an image model's.
    """
    if settings.fused_loss != "auto":
        return
    vocabulary, conflict = getattr(config.get_text_config(), "vocab_size", None), TECHNIQUE.conflict(settings)
    if not vocabulary:
        raise UserError(
            f"--model {settings.model}: {config.model_type} is not a language model: vocab_size is missing in its "
            "config.json; use a causal language model."
        )
    is_large = vocabulary >= LARGE_VOCABULARY
    why = f"a vocabulary of {vocabulary:,} tokens, {'at least' if is_large else 'below'} {LARGE_VOCABULARY:,}"
    if conflict:
        why = f"with {conflict.typed(settings)} {conflict.why}"
    decide(settings, "fused_loss", is_large and not conflict, why)


def install(settings, model) -> FusedLoss | None:
    """Fuse the loss of the model and return the FusedLoss; None if it is off.

    Raises: UserError for `--fused_loss true` with an unsupported model; `auto` prints a note and uses the dense loss.
    """
    if not settings.fused_loss:
        return None
    try:
        return FusedLoss(model)
    except NotFused as error:
        if settings.source["fused_loss"] != "decided":
            raise UserError(f"--fused_loss true: {error}; use --fused_loss false.") from None
        if distributed.rank() == 0:
            print(f"note: fused_loss is off: {error}", flush=True)
        return None


TECHNIQUE = Technique(
    name="fused loss",
    flag="fused_loss",
    example="--fused_loss true",
    conflicts=(
        Conflict("label_smoothing_factor", None, "it needs the logits"),
        Conflict("torch_compile", (True,), "the model's forward is traced"),
        Conflict("tp_size", None, "the head is split", "use --fused_loss false"),
        Conflict("lora_target_modules", ("lm_head",), "the head has an adapter"),
    ),
    resolve_for_model=resolve_for_model,
)
