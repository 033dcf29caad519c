"""Setups with models of transformers, built from small configurations: texts of unequal length, images, sounds."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from placewise.experiments.training_setups import optimizer_recipes as recipes
from placewise.experiments.training_setups.optimizer_recipes import recipe, trained_parameters
from placewise.experiments.training_setups.training_setup import NUM_STEPS, OptimizerRecipe, Setup, StepOptions, Task

VOCAB = 96

Config = dict[str, Any]
Batches = Callable[[], list[dict[str, Any]]]

WIDTHS: Config = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TEXT: Config = {
    **WIDTHS,
    "vocab_size": VOCAB,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
DECODER: Config = {**TEXT, "num_key_value_heads": 2}
EXPERTS: Config = {**DECODER, "head_dim": 8, "num_experts_per_tok": 2}
SEQ_TO_SEQ: Config = {
    "vocab_size": VOCAB, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_position_embeddings": 32,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2,
}  # fmt: skip
IMAGE: Config = {**WIDTHS, "image_size": 32, "patch_size": 8, "num_labels": 5}
SERIES: Config = {
    "prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1, "d_model": 16,
    "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
}  # fmt: skip
UNMASKED: Config = {"mask_time_prob": 0.0, "layerdrop": 0.0}
SOUND: Config = {
    **WIDTHS, "conv_dim": (16, 16), "conv_kernel": (10, 3), "conv_stride": (5, 2), "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8, "num_conv_pos_embedding_groups": 2, "num_labels": 4, "vocab_size": 20,
    "classifier_proj_size": 16,
}  # fmt: skip


# --- batches ---


def _ids(rows: int, length: int) -> tuple[Tensor, Tensor]:
    """Returns token ids, padded with 0 behind lengths that differ, and the mask of those that are not padding."""
    lengths = torch.randint(length // 2, length + 1, (rows,))
    lengths[0] = length
    mask = (torch.arange(length) < lengths[:, None]).long()
    return torch.randint(3, VOCAB, (rows, length)) * mask, mask


def next_tokens(rows: int = 4, length: int = 12) -> list[dict[str, Any]]:
    """Returns texts whose next tokens are predicted."""
    texts = [_ids(rows, length) for _ in range(NUM_STEPS)]
    return [{"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)} for ids, mask in texts]


def _masked_tokens(rows: int = 4, length: int = 12) -> list[dict[str, Any]]:
    """Returns texts some of whose tokens are hidden and predicted."""
    batches = []
    for ids, mask in (_ids(rows, length) for _ in range(NUM_STEPS)):
        hidden = (torch.rand(rows, length) < 0.3) & (mask == 1)
        hidden[:, 0] = True
        labels = ids.masked_fill(~hidden, -100)
        batches.append({"input_ids": ids.masked_fill(hidden, 3), "attention_mask": mask, "labels": labels})
    return batches


def classified_texts(rows: int = 4, length: int = 12) -> list[dict[str, Any]]:
    """Returns texts, each with one of two classes."""
    texts = [_ids(rows, length) for _ in range(NUM_STEPS)]
    return [{"input_ids": ids, "attention_mask": mask, "labels": torch.randint(2, (rows,))} for ids, mask in texts]


def _classified_tokens(rows: int = 4, length: int = 12) -> list[dict[str, Any]]:
    texts = [_ids(rows, length) for _ in range(NUM_STEPS)]
    labels = [torch.randint(2, (rows, length)).masked_fill(mask == 0, -100) for _, mask in texts]
    return [{"input_ids": i, "attention_mask": m, "labels": label} for (i, m), label in zip(texts, labels, strict=True)]


def _answers(rows: int = 4, length: int = 12) -> list[dict[str, Any]]:
    return [
        {
            **dict(zip(("input_ids", "attention_mask"), _ids(rows, length), strict=True)),
            "start_positions": torch.randint(length // 2, (rows,)),
            "end_positions": torch.randint(length // 2, (rows,)),
        }
        for _ in range(NUM_STEPS)
    ]


def _pairs(rows: int = 4) -> list[dict[str, Any]]:
    """Returns sources and targets, padded."""
    batches = []
    for _ in range(NUM_STEPS):
        (source, mask), (target, target_mask) = _ids(rows, 10), _ids(rows, 8)
        labels = target.masked_fill(target_mask == 0, -100)
        batches.append({"input_ids": source, "attention_mask": mask, "labels": labels})
    return batches


def image_batches(rows: int = 4, size: int = 32, dtype: torch.dtype = torch.float32) -> list[dict[str, Any]]:
    """Returns images, each with one of five classes."""
    return [
        {"pixel_values": torch.randn(rows, 3, size, size).to(dtype), "labels": torch.randint(5, (rows,))}
        for _ in range(NUM_STEPS)
    ]


def _segmented(rows: int = 2) -> list[dict[str, Any]]:
    return [
        {"pixel_values": torch.randn(rows, 3, 64, 64), "labels": torch.randint(5, (rows, 64, 64))} for _ in range(NUM_STEPS)
    ]


def _captions(rows: int = 4, loss: bool = True) -> list[dict[str, Any]]:
    """Returns images with texts; CLIP computes its loss only if it is asked to."""
    batches = []
    for images in image_batches(rows):
        ids, mask = _ids(rows, 10)
        batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": images["pixel_values"]}
        batches.append({**batch, "return_loss": True} if loss else {**batch, "labels": ids})
    return batches


def _sounds(labels: Callable[[], Tensor], rows: int = 2, length: int = 400) -> list[dict[str, Any]]:
    return [{"input_values": torch.randn(rows, length), "labels": labels()} for _ in range(NUM_STEPS)]


def _spectra(rows: int = 2) -> list[dict[str, Any]]:
    batches = []
    for _ in range(NUM_STEPS):
        ids, mask = _ids(rows, 8)
        batches.append({"input_features": torch.randn(rows, 16, 40), "labels": ids.masked_fill(mask == 0, -100)})
    return batches


def _series(rows: int = 4) -> list[dict[str, Any]]:
    return [{"past_values": torch.randn(rows, 32, 2), "future_values": torch.randn(rows, 8, 2)} for _ in range(NUM_STEPS)]


def _packed_texts(length: int = 12) -> list[dict[str, Any]]:
    """Returns rows of two texts each, whose positions begin anew."""
    batches = []
    for _ in range(NUM_STEPS):
        ids, first = torch.randint(3, VOCAB, (2, length)), int(torch.randint(3, 9, ()))
        positions = torch.cat([torch.arange(first), torch.arange(length - first)]).expand(2, length)
        batches.append({"input_ids": ids, "position_ids": positions, "labels": ids})
    return batches


def _unlabelled() -> list[dict[str, Any]]:
    return [{"pixel_values": batch["pixel_values"]} for batch in image_batches()]


def _videos() -> list[dict[str, Any]]:
    return [{"pixel_values": torch.randn(2, 4, 3, 32, 32), "labels": torch.randint(5, (2,))} for _ in range(NUM_STEPS)]


def _known_series() -> list[dict[str, Any]]:
    """Returns series with features of their times."""
    return [
        {
            "past_values": torch.randn(3, 10),
            "past_time_features": torch.randn(3, 10, 1),
            "past_observed_mask": torch.ones(3, 10),
            "future_values": torch.randn(3, 4),
            "future_time_features": torch.randn(3, 4, 1),
        }
        for _ in range(NUM_STEPS)
    ]


# --- models ---


def _library() -> Any:
    """Returns transformers, when a setup needs it."""
    import transformers

    return transformers


def _build(
    model: str, config: dict[str, Any], batches: Batches, weights: torch.dtype, checkpoints: bool, **more: Any
) -> Task:
    transformers = _library()
    kind = next(name for name in _configs(model) if hasattr(transformers, name))
    built = getattr(transformers, model)(getattr(transformers, kind)(**config)).to(weights).train()
    if checkpoints:
        built.gradient_checkpointing_enable()
    return Task(built, batches(), **more)


def _configs(model: str) -> list[str]:
    """Returns names that the configuration of a class may have, the longest first: BertForMaskedLM has BertConfig."""
    return [f"{model[:end]}Config" for end in range(len(model), 0, -1)]


def _setup(
    name: str,
    model: str,
    optimizer: OptimizerRecipe,
    config: dict[str, Any],
    batches: Batches,
    extras: str = "",
    weights: torch.dtype = torch.float32,
    checkpoints: bool = False,
    loss_fn: Callable[..., Tensor] | None = None,
    **options: Any,
) -> Setup:
    def build() -> Task:
        return _build(model, config, batches, weights, checkpoints, loss_fn=loss_fn)

    words = ", ".join(filter(None, [extras, "gradient checkpointing" if checkpoints else ""]))
    return Setup(name, "transformers", model, optimizer, build, StepOptions(**options), weights, words)


def _detection_loss(output: Any) -> Tensor:
    """Returns a loss of DETR's outputs that needs no matching: the first queries are the objects."""
    boxes = output.pred_boxes[:, :2]
    classes = nn.functional.cross_entropy(output.logits[:, :2].mT, torch.zeros(2, 2, dtype=torch.long))
    return classes + nn.functional.l1_loss(boxes, torch.full_like(boxes, 0.5))


def _detr() -> Task:
    transformers = _library()
    backbone = transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], out_features=["stage2"])
    config = transformers.DetrConfig(
        backbone_config=backbone, use_timm_backbone=False, use_pretrained_backbone=False, backbone=None, num_queries=6,
        d_model=32, encoder_layers=1, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, num_labels=3,
    )  # fmt: skip
    batches = [{"pixel_values": torch.randn(2, 3, 64, 64)} for _ in range(NUM_STEPS)]
    return Task(transformers.DetrForObjectDetection(config).train(), batches, _detection_loss)


def _clip() -> Task:
    transformers = _library()
    text = {**TEXT, "projection_dim": 16}
    config = transformers.CLIPConfig(text_config=text, vision_config={**IMAGE, "projection_dim": 16}, projection_dim=16)
    return Task(transformers.CLIPModel(config).train(), _captions())


def _blip() -> Task:
    transformers = _library()
    text = {**TEXT, "projection_dim": 16, "encoder_hidden_size": 32}
    config = transformers.BlipConfig(text_config=text, vision_config={**IMAGE, "projection_dim": 16}, projection_dim=16)
    return Task(transformers.BlipForConditionalGeneration(config).train(), _captions(loss=False))


def _siglip() -> Task:
    transformers = _library()
    text = {**TEXT, "projection_size": 32}
    config = transformers.SiglipConfig(text_config=text, vision_config=IMAGE)
    return Task(transformers.SiglipModel(config).train(), _captions())


def _llava() -> Task:
    """Returns a language model that reads an image as 17 of its tokens."""
    transformers = _library()
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**{key: IMAGE[key] for key in IMAGE if key != "num_labels"}),
        text_config=transformers.LlamaConfig(**DECODER), image_token_id=VOCAB - 1, image_token_index=VOCAB - 1,
        vision_feature_select_strategy="full",
    )  # fmt: skip
    batches = []
    for _ in range(NUM_STEPS):
        ids = torch.randint(3, VOCAB - 1, (2, 24))
        ids[:, 1:18] = VOCAB - 1
        batches.append({"input_ids": ids, "pixel_values": torch.randn(2, 3, 32, 32), "labels": ids})
    return Task(transformers.LlavaForConditionalGeneration(config).train(), batches)


def _frozen_encoder() -> Task:
    """Returns BERT with all but its last layer and its head frozen, as for a small data set."""
    transformers = _library()
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)).train()
    model.bert.embeddings.requires_grad_(False)
    model.bert.encoder.layer[0].requires_grad_(False)
    return Task(model, classified_texts())


def _adafactor(model: nn.Module) -> torch.optim.Optimizer:
    kind = _library().optimization.Adafactor
    optimizer: torch.optim.Optimizer = kind(trained_parameters(model), lr=1e-3, relative_step=False, scale_parameter=False)
    return optimizer


def _cosine_of_transformers(optimizer: torch.optim.Optimizer) -> Any:
    return _library().get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=2, num_training_steps=8)


THEIR_ADAFACTOR = OptimizerRecipe("Adafactor of transformers", _adafactor)
ADAMW_THEIR_COSINE = recipe("AdamW, cosine of transformers", torch.optim.AdamW, _cosine_of_transformers, lr=2e-3)
TRAINER = OptimizerRecipe(
    "AdamW, fused, no decay of biases",
    lambda model: torch.optim.AdamW(recipes.decay_groups(model), lr=1e-3, fused=True),
    _cosine_of_transformers,
)
BF16, FP16 = torch.bfloat16, torch.float16

# fmt: off
SETUPS = (
    # decoders
    _setup("llama", "LlamaForCausalLM", recipes.ADAMW_GROUPS, DECODER, next_tokens, clip_grad_norm=1.0),
    _setup("llama-autocast", "LlamaForCausalLM", recipes.ADAMW_GROUPS, DECODER, next_tokens, autocast=BF16,
           clip_grad_norm=1.0),
    _setup("llama-bfloat16", "LlamaForCausalLM", recipes.ADAMW, DECODER, next_tokens, weights=BF16, clip_grad_norm=1.0),
    _setup("llama-float16", "LlamaForCausalLM", recipes.ADAMW, DECODER, next_tokens, autocast=FP16, grad_scale=2.0**16,
           clip_grad_norm=1.0),
    _setup("llama-checkpointed", "LlamaForCausalLM", TRAINER, DECODER, next_tokens, checkpoints=True, autocast=BF16),
    _setup("llama-accumulated", "LlamaForCausalLM", ADAMW_THEIR_COSINE, {**DECODER, "attention_dropout": 0.1}, next_tokens,
           micro_batches=4, clip_grad_norm=0.5),
    _setup("llama-outputs", "LlamaForCausalLM", recipes.ADAM, {**DECODER, "use_cache": False}, next_tokens, outputs=True),
    _setup("mistral", "MistralForCausalLM", recipes.ADAM, {**DECODER, "sliding_window": 6}, next_tokens, "sliding window"),
    _setup("qwen2", "Qwen2ForCausalLM", recipes.ADAMW_ONE_CYCLE, DECODER, next_tokens, clip_grad_norm=1.0),
    _setup("qwen3", "Qwen3ForCausalLM", recipes.ADAMW_FUSED, {**DECODER, "head_dim": 8, "tie_word_embeddings": True},
           next_tokens, "tied weights"),
    _setup("gemma", "GemmaForCausalLM", recipes.ADAFACTOR, {**DECODER, "head_dim": 8}, next_tokens),
    _setup("gemma2", "Gemma2ForCausalLM", recipes.ADAMW, {**DECODER, "head_dim": 8, "sliding_window": 6}, next_tokens,
           "soft caps", autocast=BF16),
    _setup("gpt2", "GPT2LMHeadModel", recipes.ADAMW_COSINE,
           {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "bos_token_id": 1,
            "eos_token_id": 2}, next_tokens, "tied weights, dropout", micro_batches=2, clip_grad_norm=1.0),
    _setup("gpt-neox", "GPTNeoXForCausalLM", recipes.NADAM, {**TEXT, "attention_dropout": 0.1}, next_tokens),
    _setup("phi", "PhiForCausalLM", recipes.RMSPROP, DECODER, next_tokens),
    _setup("phi3", "Phi3ForCausalLM", recipes.ADAMW, DECODER, next_tokens, weights=BF16),
    _setup("mixtral", "MixtralForCausalLM", recipes.ADAMW,
           {**EXPERTS, "num_local_experts": 4, "output_router_logits": True}, next_tokens, "loss of the router"),
    _setup("qwen3-moe", "Qwen3MoeForCausalLM", recipes.ADAMW_GROUPS,
           {**EXPERTS, "num_experts": 4, "moe_intermediate_size": 32, "decoder_sparse_step": 1}, next_tokens,
           clip_grad_norm=1.0),
    _setup("deepseek-v3", "DeepseekV3ForCausalLM", recipes.ADAMW,
           {**TEXT, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "n_group": 2, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 4, "v_head_dim": 8,
            "qk_nope_head_dim": 8, "first_k_dense_replace": 1}, next_tokens),
    _setup("gpt-oss", "GptOssForCausalLM", recipes.ADAMW, {**EXPERTS, "num_local_experts": 4, "sliding_window": 6},
           next_tokens),
    _setup("falcon", "FalconForCausalLM", recipes.ADAM_FOREACH,
           {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "bos_token_id": 1,
            "eos_token_id": 2}, next_tokens, "ALiBi is off"),
    _setup("opt", "OPTForCausalLM", recipes.ADAMW,
           {**TEXT, "ffn_dim": 64, "word_embed_proj_dim": 32}, next_tokens, "layer drop 0", clip_grad_norm=1.0),
    _setup("bloom", "BloomForCausalLM", recipes.ADAMAX,
           {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "bos_token_id": 1, "eos_token_id": 2,
            "hidden_dropout": 0.1}, next_tokens),
    _setup("mamba", "MambaForCausalLM", recipes.ADAMW,
           {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "bos_token_id": 1,
            "eos_token_id": 2, "pad_token_id": 0, "use_cache": False}, next_tokens),
    _setup("llama-packed", "LlamaForCausalLM", recipes.ADAMW, {**DECODER, "use_cache": False}, _packed_texts,
           "two texts in each row, by positions"),
    _setup("mamba2", "Mamba2ForCausalLM", recipes.ADAMW,
           {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4, "num_heads": 8, "head_dim": 8,
            "n_groups": 2, "chunk_size": 4, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
           next_tokens, clip_grad_norm=1.0),
    _setup("jamba", "JambaForCausalLM", recipes.ADAMW,
           {**EXPERTS, "num_experts": 2, "use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1,
            "expert_layer_period": 2, "expert_layer_offset": 1, "mamba_d_state": 4, "mamba_dt_rank": 4, "use_cache": False},
           next_tokens, "Mamba, attention and experts"),
    _setup("olmoe", "OlmoeForCausalLM", recipes.ADAMW, {**EXPERTS, "num_experts": 4, "output_router_logits": True},
           next_tokens, "loss of the router", autocast=BF16),
    _setup("lfm2", "Lfm2ForCausalLM", recipes.ADAMW_COSINE, DECODER, next_tokens, "short convolutions"),
    _setup("xlnet", "XLNetLMHeadModel", recipes.ADAMW,
           {"vocab_size": VOCAB, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 64}, _masked_tokens),
    # encoders
    _setup("bert", "BertForSequenceClassification", TRAINER, TEXT, classified_texts, clip_grad_norm=1.0),
    _setup("bert-masked", "BertForMaskedLM", recipes.ADAMW_COSINE, TEXT, _masked_tokens, autocast=BF16, micro_batches=2),
    _setup("bert-answers", "BertForQuestionAnswering", recipes.ADAMW, TEXT, _answers, outputs=True),
    Setup("bert-frozen", "transformers", "BertForSequenceClassification", recipes.ADAMW, _frozen_encoder,
          extras="embeddings and first layer frozen"),
    _setup("roberta", "RobertaForTokenClassification", recipes.RADAM, TEXT, _classified_tokens),
    _setup("deberta", "DebertaV2ForSequenceClassification", recipes.ADAMW,
           {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}, classified_texts),
    _setup("electra", "ElectraForPreTraining", recipes.ADAMW, {**TEXT, "embedding_size": 16}, _classified_tokens),
    _setup("albert", "AlbertForMaskedLM", recipes.ADAGRAD, {**TEXT, "embedding_size": 16}, _masked_tokens, "shared layers"),
    _setup("distilbert", "DistilBertForSequenceClassification", recipes.ADAMW,
           {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "pad_token_id": 0},
           classified_texts, clip_grad_value=0.5),
    _setup("modernbert", "ModernBertForMaskedLM", recipes.ADAMW,
           {**TEXT, "local_attention": 8, "cls_token_id": 1, "sep_token_id": 2}, _masked_tokens, autocast=BF16),
    _setup("longformer", "LongformerForSequenceClassification", recipes.ADAMW, {**TEXT, "attention_window": 4},
           classified_texts),
    # sequence to sequence
    _setup("t5", "T5ForConditionalGeneration", THEIR_ADAFACTOR,
           {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
            "decoder_start_token_id": 0}, _pairs),
    _setup("t5-bfloat16", "T5ForConditionalGeneration", recipes.ADAFACTOR,
           {"vocab_size": VOCAB, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "pad_token_id": 0,
            "decoder_start_token_id": 0}, _pairs, weights=BF16),
    _setup("bart", "BartForConditionalGeneration", recipes.ADAMW_COSINE, SEQ_TO_SEQ, _pairs, clip_grad_norm=0.1),
    _setup("bart-layer-drop", "BartForConditionalGeneration", recipes.ADAM,
           {**SEQ_TO_SEQ, "encoder_layerdrop": 0.5, "decoder_layerdrop": 0.5}, _pairs, "layers dropped at random"),
    _setup("marian", "MarianMTModel", recipes.ADAMW, SEQ_TO_SEQ, _pairs, micro_batches=2),
    _setup("mbart", "MBartForConditionalGeneration", recipes.ADAMW, SEQ_TO_SEQ, _pairs, autocast=BF16),
    _setup("pegasus", "PegasusForConditionalGeneration", THEIR_ADAFACTOR, SEQ_TO_SEQ, _pairs),
    _setup("whisper", "WhisperForConditionalGeneration", recipes.ADAMW_COSINE,
           {**SEQ_TO_SEQ, "num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16}, _spectra,
           clip_grad_norm=1.0),
    # sounds
    _setup("wav2vec2", "Wav2Vec2ForSequenceClassification", recipes.ADAMW, {**SOUND, **UNMASKED},
           lambda: _sounds(lambda: torch.randint(4, (2,)))),
    _setup("wav2vec2-masked", "Wav2Vec2ForSequenceClassification", recipes.ADAMW,
           {**SOUND, **UNMASKED, "mask_time_prob": 0.3, "mask_time_length": 2},
           lambda: _sounds(lambda: torch.randint(4, (2,))), "SpecAugment"),
    _setup("wav2vec2-ctc", "Wav2Vec2ForCTC", recipes.ADAMW, {**SOUND, **UNMASKED},
           lambda: _sounds(lambda: torch.randint(1, 20, (2, 5))), "CTC loss"),
    _setup("hubert", "HubertForSequenceClassification", recipes.ADAMW, {**SOUND, **UNMASKED},
           lambda: _sounds(lambda: torch.randint(4, (2,))), clip_grad_norm=1.0),
    # images
    _setup("vit", "ViTForImageClassification", recipes.ADAMW_COSINE, {**IMAGE, "hidden_dropout_prob": 0.1}, image_batches,
           autocast=BF16),
    _setup("vit-bfloat16", "ViTForImageClassification", recipes.ADAMW, IMAGE, lambda: image_batches(dtype=BF16),
           weights=BF16),
    _setup("deit", "DeiTForImageClassification", recipes.ADAMW, IMAGE, image_batches, outputs=True),
    _setup("swin", "SwinForImageClassification", recipes.ADAMW,
           {"image_size": 32, "patch_size": 2, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4,
            "num_labels": 5, "drop_path_rate": 0.2}, image_batches, "drop path", clip_grad_norm=5.0),
    _setup("convnext", "ConvNextForImageClassification", recipes.ADAMW_ONE_CYCLE,
           {"hidden_sizes": [8, 16], "depths": [1, 2], "num_stages": 2, "num_labels": 5, "drop_path_rate": 0.2},
           image_batches, "drop path"),
    _setup("dinov2", "Dinov2ForImageClassification", recipes.MOMENTUM, {**IMAGE, "drop_path_rate": 0.1}, image_batches),
    _setup("segformer", "SegformerForSemanticSegmentation", recipes.ADAMW,
           {"hidden_sizes": [8, 16, 16, 16], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 2],
            "decoder_hidden_size": 16, "num_labels": 5}, _segmented, "drop path"),
    Setup("detr", "transformers", "DetrForObjectDetection", recipes.ADAMW, _detr, StepOptions(clip_grad_norm=0.1),
          extras="loss without matching"),
    Setup("clip", "transformers", "CLIPModel", recipes.ADAMW_GROUPS, _clip, StepOptions(autocast=BF16),
          extras="contrastive loss"),
    Setup("blip", "transformers", "BlipForConditionalGeneration", recipes.ADAMW, _blip, extras="captions"),
    Setup("siglip", "transformers", "SiglipModel", recipes.ADAMW, _siglip, StepOptions(autocast=BF16),
          extras="sigmoid loss of pairs"),
    Setup("llava", "transformers", "LlavaForConditionalGeneration", recipes.ADAMW, _llava, StepOptions(clip_grad_norm=1.0),
          extras="images among the tokens"),
    _setup("vit-mae", "ViTMAEForPreTraining", recipes.ADAMW,
           {**IMAGE, "decoder_hidden_size": 16, "decoder_num_hidden_layers": 1, "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32}, _unlabelled, "patches masked at random"),
    _setup("videomae", "VideoMAEForVideoClassification", recipes.ADAMW, {**IMAGE, "num_frames": 4, "tubelet_size": 2},
           _videos),
    # time series
    _setup("time-series-transformer", "TimeSeriesTransformerForPrediction", recipes.ADAM, SERIES, _known_series,
           "torch.distributions, checks of arguments"),
    _setup("patchtst", "PatchTSTForPrediction", recipes.ADAM,
           {"num_input_channels": 2, "context_length": 32, "prediction_length": 8, "patch_length": 4, "patch_stride": 4,
            "d_model": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "ffn_dim": 32}, _series),
)
# fmt: on
