"""Training steps outside of the zoo, of transformers and torchvision, for `placewise bench predictions` and `bench speed`.

They are built from configurations, of a size for a data centre's GPU. `NAME_bf16` is the same step with autocast in
bfloat16, `NAME_in_bf16` the same with all weights in bfloat16.
"""

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor, nn

from placewise.experiments.training_setups.torchvision_ops import declare_missing_ops
from placewise.graph_capture.training_step import TrainingStep

declare_missing_ops()  # transformers loads torchvision, too

NAMES = ("llama", "t5", "vit", "convnext", "densenet", "efficientnet", "unet", "mamba")

WHOLE = ("wide_llama", "wide_bert")  # for a whole GPU, in one micro-batch

IN_BF16, BF16 = "_in_bf16", "_bf16"


def llama() -> TrainingStep:
    """12 layers of 1024, 16 heads with 4 of keys, 32 texts of 512 tokens in 8 micro-batches."""
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    return _llama(32, 512, 8, sizes)


def wide_llama() -> TrainingStep:
    """12 layers of 1536, 12 heads, 8 texts of 1024 tokens."""
    sizes = {"hidden_size": 1536, "intermediate_size": 4096, "num_attention_heads": 12, "num_key_value_heads": 12}
    return _llama(8, 1024, 1, sizes)


def llama_7b() -> TrainingStep:
    """32 layers of 4096 with all weights in bfloat16, one text of 1024 tokens; without values, so a laptop can plan it."""
    sizes = {"hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 32}
    with torch.device("meta"):
        return _llama(1, 1024, 1, sizes, torch.bfloat16)


def _llama(
    rows: int, length: int, micro_batches: int, sizes: dict[str, int], dtype: torch.dtype = torch.float32
) -> TrainingStep:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"num_hidden_layers": 12, **sizes}
    config = LlamaConfig(vocab_size=32000, max_position_embeddings=length, use_cache=False, **sizes)  # type: ignore[arg-type]
    model: nn.Module = LlamaForCausalLM(config)  # type: ignore[no-untyped-call]
    return _language(model.to(dtype), rows, length, micro_batches)


def wide_bert() -> TrainingStep:
    """BERT-base without dropout, 32 texts of 256 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    return _language(BertForMaskedLM(config), 32, 256, 1)  # type: ignore[no-untyped-call]


def t5() -> TrainingStep:
    """6 layers of 512 on each side, 32 pairs of 256 tokens in 4 micro-batches."""
    from transformers import T5Config, T5ForConditionalGeneration

    model = T5ForConditionalGeneration(T5Config(dropout_rate=0.0, use_cache=False))
    model.config.decoder_start_token_id = 0
    return _language(model, 32, 256, 4)


def mamba() -> TrainingStep:
    """8 layers of 512, 8 texts of 32 tokens; PyTorch's own scan goes token by token."""
    from transformers import MambaConfig, MambaForCausalLM

    config = MambaConfig(hidden_size=512, num_hidden_layers=8, vocab_size=16000, use_cache=False)
    return _language(MambaForCausalLM(config), 8, 32, 1)  # type: ignore[no-untyped-call]


def vit() -> TrainingStep:
    """ViT-B/16, 64 images in 4 micro-batches."""
    from torchvision.models import vit_b_16

    return _images(vit_b_16(num_classes=1000), 64, 4)


def convnext() -> TrainingStep:
    """ConvNeXt-B, 64 images."""
    from torchvision.models import convnext_base

    return _images(convnext_base(), 64)


def densenet() -> TrainingStep:
    """DenseNet-121, 128 images."""
    from torchvision.models import densenet121

    return _images(densenet121(), 128)


def efficientnet() -> TrainingStep:
    """EfficientNet-B0, 128 images."""
    from torchvision.models import efficientnet_b0

    return _images(efficientnet_b0(), 128)


def unet() -> TrainingStep:
    """A UNet of four levels, 16 images of 256 x 256."""
    model, images = UNet(), torch.zeros(16, 3, 256, 256)
    batch = (images, torch.zeros(16, 256, 256, dtype=torch.long))
    return TrainingStep(model, nn.functional.cross_entropy, _adamw(model), batch)


def bert_with_dropout() -> TrainingStep:
    """6 layers of BERT-base with its dropout, 32 texts of 256 tokens."""
    from transformers import BertConfig, BertForMaskedLM

    return _language(BertForMaskedLM(BertConfig(num_hidden_layers=6)), 32, 256, 1)  # type: ignore[no-untyped-call]


def gpt2_with_dropout() -> TrainingStep:
    """6 layers of GPT-2 with its dropout, 16 texts of 512 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return _language(GPT2LMHeadModel(GPT2Config(n_layer=6, use_cache=False)), 16, 512, 1)  # type: ignore[no-untyped-call]


def swin() -> TrainingStep:
    """Swin-T, 64 images."""
    from torchvision.models import swin_t

    return _images(swin_t(), 64)


def mobilenet() -> TrainingStep:
    """MobileNetV3-L, 128 images."""
    from torchvision.models import mobilenet_v3_large

    return _images(mobilenet_v3_large(), 128)


def encoder() -> TrainingStep:
    """6 of torch's own transformer layers of 512, with dropout, 32 texts of 256 tokens."""
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, norm_first=True)
    return _words(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), 256)


def lstm() -> TrainingStep:
    """2 layers of nn.LSTM of 512, 32 texts of 64 tokens."""
    return _words(_First(nn.LSTM(512, 512, 2, batch_first=True)), 64)


def whole_lstm() -> TrainingStep:
    """The same with the layers as one op each way."""
    return replace(lstm(), whole_layers=True)


def gru() -> TrainingStep:
    """2 layers of nn.GRU of 512, 32 texts of 64 tokens."""
    return _words(_First(nn.GRU(512, 512, 2, batch_first=True)), 64)


def rms_norm() -> TrainingStep:
    """4 blocks of nn.RMSNorm, two layers, dropout and group norm, 32 texts of 64 tokens."""
    blocks = [
        (nn.RMSNorm(512), nn.Linear(512, 1024), nn.SiLU(), nn.Dropout(), nn.Linear(1024, 512), nn.GroupNorm(8, 64))
        for _ in range(4)
    ]
    return _words(nn.Sequential(*(layer for block in blocks for layer in block)), 64)


class _First(nn.Module):
    """The first of what a module returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)[0]  # type: ignore[no-any-return]


def _words(inner: nn.Module, length: int) -> TrainingStep:
    """Returns the step of a model of words around these layers, which are 512 wide."""
    model = nn.Sequential(nn.Embedding(5000, 512), inner, nn.Linear(512, 5000), nn.Flatten(0, 1))
    texts = torch.zeros(32, length, dtype=torch.long)
    return TrainingStep(model, _word_loss, _adamw(model), (texts, texts.clone()))


def _word_loss(scores: Tensor, words: Tensor) -> Tensor:
    return nn.functional.cross_entropy(scores, words.flatten())


class UNet(nn.Module):
    """Convolutions down four levels and up again, with a shortcut on each level."""

    def __init__(self, width: int = 64, levels: int = 4, classes: int = 21) -> None:
        super().__init__()
        widths = [width << level for level in range(levels + 1)]
        self.first = _convolutions(3, width)
        self.down = nn.ModuleList(_convolutions(a, b) for a, b in pairwise(widths))
        self.wider = nn.ModuleList(nn.ConvTranspose2d(b, a, 2, 2) for a, b in pairwise(widths))
        self.up = nn.ModuleList(_convolutions(2 * a, a) for a in widths[:-1])
        self.last = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the scores of the classes: [batch, classes, height, width]."""
        kept = [self.first(x)]
        for convolve in self.down:
            kept.append(convolve(nn.functional.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for widen, convolve in zip(reversed(self.wider), reversed(self.up), strict=True):
            x = convolve(torch.cat([kept.pop(), widen(x)], dim=1))
        return self.last(x)  # type: ignore[no-any-return]


def _convolutions(width: int, to: int) -> nn.Module:
    layers: list[nn.Module] = []
    for given in (width, to):
        layers += [nn.Conv2d(given, to, 3, padding=1, bias=False), nn.BatchNorm2d(to), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _language(model: nn.Module, rows: int, length: int, micro_batches: int) -> TrainingStep:
    texts = torch.zeros(rows, length, dtype=torch.long)
    return TrainingStep(model, None, _adamw(model), {"input_ids": texts, "labels": texts.clone()}, micro_batches)


def _images(model: nn.Module, rows: int, micro_batches: int = 1) -> TrainingStep:
    batch = (torch.zeros(rows, 3, 224, 224), torch.zeros(rows, dtype=torch.long))
    return TrainingStep(model, nn.functional.cross_entropy, _adamw(model), batch, micro_batches)


def _adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-4)


def __getattr__(name: str) -> Callable[[], TrainingStep]:
    """Returns `NAME_bf16` or `NAME_in_bf16`."""
    end = IN_BF16 if name.endswith(IN_BF16) else BF16
    build = globals().get(name.removesuffix(end))
    if not name.endswith(end) or name.removesuffix(end) not in (*NAMES, *WHOLE) or build is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return (lambda: _in_bf16(build())) if end == IN_BF16 else (lambda: replace(build(), autocast=torch.bfloat16))


def _in_bf16(step: TrainingStep) -> TrainingStep:
    """Returns the step with the model's weights, and what the batch has of floats, in bfloat16."""
    step.model.to(torch.bfloat16)
    batch = step.batch
    if isinstance(batch, tuple):
        batch = tuple(tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor for tensor in batch)
    return replace(step, batch=batch, optimizer=_adamw(step.model))
