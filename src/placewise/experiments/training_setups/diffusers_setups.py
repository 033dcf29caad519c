"""Setups with models of diffusers: noise is predicted, flows are matched, images are coded and decoded."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from placewise.experiments.training_setups import optimizer_recipes as recipes
from placewise.experiments.training_setups.training_setup import NUM_STEPS, OptimizerRecipe, Setup, StepOptions, Task

ROWS = 4

UNET: dict[str, Any] = {"block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4, "sample_size": 8}


def _library() -> Any:
    """Returns diffusers with its parts, when a setup needs it."""
    import diffusers
    import diffusers.training_utils

    return diffusers


class Predictor(nn.Module):
    """A model of diffusers as a function of its inputs alone: its prediction, without the class around it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        prediction: Tensor = self.model(**inputs, return_dict=False)[0]
        return prediction


class Coder(nn.Module):
    """The step of an autoencoder: reconstruction, and the divergence of a sampled code."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        code = self.model.encode(images).latent_dist
        decoded = self.model.decode(code.sample()).sample
        loss: Tensor = F.mse_loss(decoded, images) + 1e-4 * code.kl().mean()
        return loss


class QuantizedCoder(nn.Module):
    """The step of an autoencoder whose codes are the nearest entries of a table."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        quantized, loss, _ = self.model.quantize(self.model.encode(images).latents)
        decoded = self.model.decode(quantized, force_not_quantize=True).sample
        total: Tensor = F.l1_loss(decoded, images) + loss
        return total


def _noised(shape: tuple[int, ...] = (ROWS, 3, 8, 8)) -> tuple[Tensor, Tensor, Tensor]:
    """Returns images with noise, the noise, and how much of it there is."""
    scheduler = _library().DDPMScheduler(num_train_timesteps=100)
    images, noise, steps = torch.randn(shape), torch.randn(shape), torch.randint(100, (shape[0],))
    return scheduler.add_noise(images, noise, steps), noise, steps


def _unet_batches() -> list[Any]:
    batches = [_noised() for _ in range(NUM_STEPS)]
    return [({"sample": sample, "timestep": steps}, noise) for sample, noise, steps in batches]


def _text_batches() -> list[Any]:
    batches = [(_noised((ROWS, 4, 8, 8)), torch.randn(ROWS, 6, 16)) for _ in range(NUM_STEPS)]
    return [
        ({"sample": sample, "timestep": steps, "encoder_hidden_states": text}, noise)
        for (sample, noise, steps), text in batches
    ]


def _class_batches() -> list[Any]:
    batches = [(_noised((ROWS, 4, 8, 8)), torch.randint(5, (ROWS,))) for _ in range(NUM_STEPS)]
    return [
        ({"hidden_states": sample, "timestep": steps, "class_labels": labels}, noise)
        for (sample, noise, steps), labels in batches
    ]


def _sd3_batches() -> list[Any]:
    return [
        (
            {
                "hidden_states": torch.randn(ROWS, 4, 8, 8),
                "encoder_hidden_states": torch.randn(ROWS, 6, 32),
                "pooled_projections": torch.randn(ROWS, 16),
                "timestep": torch.rand(ROWS) * 1000,
            },
            torch.randn(ROWS, 4, 8, 8),
        )
        for _ in range(NUM_STEPS)
    ]


def _flux_batches() -> list[Any]:
    places = torch.zeros(16, 3)
    places[:, 1], places[:, 2] = torch.arange(16) // 4, torch.arange(16) % 4
    return [
        (
            {
                "hidden_states": torch.randn(ROWS, 16, 4),
                "encoder_hidden_states": torch.randn(ROWS, 6, 32),
                "pooled_projections": torch.randn(ROWS, 16),
                "timestep": torch.rand(ROWS),
                "img_ids": places,
                "txt_ids": torch.zeros(6, 3),
            },
            torch.randn(ROWS, 16, 4),
        )
        for _ in range(NUM_STEPS)
    ]


def _pictures() -> list[Tensor]:
    return [torch.rand(ROWS, 3, 16, 16) * 2 - 1 for _ in range(NUM_STEPS)]


def _setup(
    name: str,
    model: str,
    optimizer: OptimizerRecipe,
    config: dict[str, Any],
    batches: Callable[[], list[Any]],
    extras: str = "",
    averages: bool = False,
    checkpoints: bool = False,
    around: Callable[[Any], nn.Module] = Predictor,
    **options: Any,
) -> Setup:
    def build() -> Task:
        built = getattr(_library(), model)(**config).train()
        if checkpoints:
            built.enable_gradient_checkpointing()
        whole, given, loss_fn = around(built), batches(), F.mse_loss if around is Predictor else None
        if not averages:
            return Task(whole, given, loss_fn)
        average = _library().training_utils.EMAModel(built.parameters(), decay=0.9, update_after_step=0)
        shadows = nn.ParameterList(average.shadow_params)
        return Task(whole, given, loss_fn, lambda: average.step(built.parameters()), {"average": shadows})

    words = [extras, "average of weights (EMA)" if averages else "", "gradient checkpointing" if checkpoints else ""]
    return Setup(name, "diffusers", model, optimizer, build, StepOptions(**options), extras=", ".join(filter(None, words)))


class Controlled(nn.Module):
    """A ControlNet that is trained to steer a frozen network."""

    def __init__(self) -> None:
        super().__init__()
        self.unet: Any = _library().UNet2DConditionModel(**UNET, **CROSS).requires_grad_(False)
        self.control: Any = _library().ControlNetModel.from_unet(self.unet, conditioning_embedding_out_channels=(8, 8))

    def forward(self, noisy: Tensor, times: Tensor, text: Tensor, condition: Tensor) -> Tensor:
        given = {"encoder_hidden_states": text}
        down, mid = self.control(noisy, times, **given, controlnet_cond=condition, return_dict=False)
        steered = {"down_block_additional_residuals": down, "mid_block_additional_residual": mid}
        return F.mse_loss(self.unet(noisy, times, **given, **steered).sample, torch.ones_like(noisy))


class Noisy(nn.Module):
    """The whole recipe of a diffusion model: it draws the noise and the times, and weighs the errors by min-SNR."""

    def __init__(self) -> None:
        super().__init__()
        self.unet: Any = _library().UNet2DModel(**UNET, **BLOCKS)
        self.schedule: Any = _library().DDPMScheduler(num_train_timesteps=50)

    def forward(self, pictures: Tensor) -> Tensor:
        noise, times = torch.randn_like(pictures), torch.randint(0, 50, (len(pictures),), device=pictures.device)
        ratio = _library().training_utils.compute_snr(self.schedule, times)
        weights = torch.stack([ratio, torch.full_like(ratio, 5)], 1).min(1)[0] / ratio
        found = self.unet(self.schedule.add_noise(pictures, noise, times), times).sample
        result: Tensor = (F.mse_loss(found, noise, reduction="none").mean((1, 2, 3)) * weights).mean()
        return result


def _controlled() -> Task:
    batches = [
        (torch.randn(ROWS, 4, 8, 8), torch.randint(100, (ROWS,)), torch.randn(ROWS, 4, 16), torch.randn(ROWS, 3, 16, 16))
        for _ in range(NUM_STEPS)
    ]
    return Task(Controlled().train(), batches)


def _noisy() -> Task:
    channels = UNET.get("in_channels", 3)
    return Task(Noisy().train(), [torch.randn(ROWS, channels, 8, 8) for _ in range(NUM_STEPS)])


BF16, FP16 = torch.bfloat16, torch.float16
BLOCKS: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "AttnDownBlock2D"),
    "up_block_types": ("AttnUpBlock2D", "UpBlock2D"),
}
CROSS: dict[str, Any] = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "cross_attention_dim": 16, "attention_head_dim": 4, "in_channels": 4, "out_channels": 4,
}  # fmt: skip
CODER: dict[str, Any] = {
    "block_out_channels": (8, 16), "down_block_types": ("DownEncoderBlock2D",) * 2,
    "up_block_types": ("UpDecoderBlock2D",) * 2, "norm_num_groups": 4,
}  # fmt: skip
SD3: dict[str, Any] = {
    "sample_size": 8, "patch_size": 2, "in_channels": 4, "out_channels": 4, "num_layers": 2, "attention_head_dim": 8,
    "num_attention_heads": 4, "caption_projection_dim": 32, "joint_attention_dim": 32, "pooled_projection_dim": 16,
    "pos_embed_max_size": 8,
}  # fmt: skip
FLUX: dict[str, Any] = {
    "patch_size": 1, "in_channels": 4, "num_layers": 1, "num_single_layers": 1, "attention_head_dim": 16,
    "num_attention_heads": 2, "joint_attention_dim": 32, "pooled_projection_dim": 16, "axes_dims_rope": (4, 4, 8),
}  # fmt: skip
DIT: dict[str, Any] = {
    "num_attention_heads": 4, "attention_head_dim": 8, "in_channels": 4, "out_channels": 4, "num_layers": 2,
    "sample_size": 8, "patch_size": 2, "num_embeds_ada_norm": 5, "norm_num_groups": 4,
}  # fmt: skip

# fmt: off
SETUPS = (
    _setup("ddpm-unet", "UNet2DModel", recipes.ADAMW_COSINE, {**UNET, **BLOCKS}, _unet_batches, averages=True,
           clip_grad_norm=1.0),
    _setup("ddpm-unet-float16", "UNet2DModel", recipes.ADAMW, {**UNET, **BLOCKS}, _unet_batches, autocast=FP16,
           grad_scale=2.0**16, clip_grad_norm=1.0),
    _setup("stable-diffusion", "UNet2DConditionModel", recipes.ADAMW, {**UNET, **CROSS}, _text_batches, autocast=BF16,
           clip_grad_norm=1.0),
    _setup("stable-diffusion-checkpointed", "UNet2DConditionModel", recipes.ADAFACTOR, {**UNET, **CROSS}, _text_batches,
           checkpoints=True, micro_batches=2),
    Setup("controlnet", "diffusers", "ControlNetModel", recipes.ADAMW, _controlled,
          StepOptions(autocast=BF16, clip_grad_norm=1.0), extras="frozen UNet2DConditionModel"),
    Setup("ddpm-noise-in-step", "diffusers", "UNet2DModel", recipes.ADAMW, _noisy, StepOptions(clip_grad_norm=1.0),
          extras="noise and times drawn in the step, min-SNR weights"),
    _setup("dit", "DiTTransformer2DModel", recipes.ADAMW, DIT, _class_batches, "labels dropped at random"),
    _setup("sd3-transformer", "SD3Transformer2DModel", recipes.ADAMW_COSINE, SD3, _sd3_batches, autocast=BF16),
    _setup("flux-transformer", "FluxTransformer2DModel", recipes.ADAMW, FLUX, _flux_batches, autocast=BF16),
    _setup("autoencoder-kl", "AutoencoderKL", recipes.ADAM, CODER, _pictures, "sampled codes", around=Coder),
    _setup("vq-autoencoder", "VQModel", recipes.ADAM, {**CODER, "num_vq_embeddings": 16}, _pictures, "nearest codes",
           around=QuantizedCoder),
)
# fmt: on
