"""The drafter's sizes: derived from the target's config, written as and read from the config.json that SGLang loads.

Layers are named by Hugging Face `hidden_states` index here; SGLang's files name them otherwise (`model_config`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_ray.drafter.rope import rope_frequencies
from eagle3_ray.model_config import default_layers, indices_of, keeps_ids, served_ids, text_config, wrong_layers

LLAMA = "LlamaForCausalLMEagle3"
MLA = "Eagle3DeepseekV2ForCausalLM"
_LARGEST = 1 << 24  # of any size; beyond it a config is damaged


class DrafterConfigError(ValueError):
    """A config that gives no drafter which SGLang would serve; the message names the field."""


@dataclass(frozen=True)
class MLASizes:
    """Multi-head latent attention of DeepSeek-V2 (arXiv 2405.04434): ranks of the down projections, head widths."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int


@dataclass(frozen=True)
class DrafterConfig:
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int  # of queries and keys
    rms_norm_eps: float
    max_position_embeddings: int
    rope: Mapping[str, Any]  # transformers-5 rope_parameters: rope_type, rope_theta and the scaling's own
    vocab_size: int
    draft_vocab_size: int
    aux_layers: tuple[int, ...]  # hidden_states indices of the target
    fc_norm: bool = False
    norm_output: bool = False
    mla: MLASizes | None = None
    keeps_ids: bool = False  # SGLang takes the target's layer ids as they are

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
        for name in (*sizes, "max_position_embeddings", "vocab_size"):
            if not 0 < getattr(self, name) < _LARGEST:
                raise DrafterConfigError(f"{name} {getattr(self, name)} must be from 1 to {_LARGEST - 1}.")
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise DrafterConfigError(
                f"draft_vocab_size {self.draft_vocab_size} must be from 1 to the target's vocab_size {self.vocab_size}."
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise DrafterConfigError(
                f"num_attention_heads {self.num_attention_heads} is no multiple of "
                f"num_key_value_heads {self.num_key_value_heads}."
            )
        try:
            rope_frequencies(self.rope, self.rope_dim, self.max_position_embeddings)
        except KeyError as error:
            raise DrafterConfigError(f"rope {dict(self.rope)} lacks {error}.") from None
        except ValueError as error:
            raise DrafterConfigError(str(error)) from None

    @property
    def rope_dim(self) -> int:
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim

    @property
    def architecture(self) -> str:
        return MLA if self.mla else LLAMA

    @classmethod
    def from_target(
        cls,
        target_config: Mapping[str, Any],
        aux_layers: Sequence[int] | None = None,
        draft_vocab_size: int = 32000,
        fc_norm: bool = False,
        norm_output: bool = False,
    ) -> "DrafterConfig":
        """The drafter of a target with this Hugging Face config (`text_config` of a multimodal one).

        A target with latent attention (`kv_lora_rank`) gets the MLA drafter, any other the Llama-style one.
        `aux_layers` None are the engines' default, `hidden_states` (2, N // 2, N - 3).

        Raises:
            DrafterConfigError: `wrong_layers`, or sizes or RoPE that no drafter can have.
        """
        target = text_config(target_config)
        chosen = default_layers(target) if aux_layers is None else tuple(aux_layers)
        if wrong := wrong_layers(target, chosen):
            raise DrafterConfigError(f"aux_layers {wrong}")
        mla = _mla_sizes(target, missing_q_rank=1536) if target.get("kv_lora_rank") else None
        return cls(
            hidden_size=int(target["hidden_size"]),
            intermediate_size=int(target["intermediate_size"]),
            **_heads(target, mla),
            rms_norm_eps=float(target.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=int(target.get("max_position_embeddings", 2048)),
            rope=_rope_of(target),
            vocab_size=int(target["vocab_size"]),
            draft_vocab_size=draft_vocab_size,
            aux_layers=chosen,
            fc_norm=fc_norm,
            norm_output=norm_output,
            mla=mla,
            keeps_ids=keeps_ids(target),
        )

    def to_json(self) -> dict[str, Any]:
        """config.json as SGLang 0.5.23 and vLLM read it, for transformers 4 (rope_scaling) and 5 (rope_parameters).

        SGLang takes the layers' ids from `eagle_config`. vLLM looks at the top first, and its ids are indices of
        `hidden_states` (vllm: v1/worker/gpu_model_runner.py, _get_eagle3_aux_layers_from_config).
        """
        rope = dict(self.rope)
        scaling = None if rope["rope_type"] == "default" else {k: v for k, v in rope.items() if k != "rope_theta"}
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": "deepseek_v3" if self.mla else "llama",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": self.num_attention_heads,
            "num_key_value_heads": self.num_key_value_heads,
            "hidden_act": "silu",
            "rms_norm_eps": self.rms_norm_eps,
            "max_position_embeddings": self.max_position_embeddings,
            "rope_theta": rope["rope_theta"],
            "rope_scaling": scaling,
            "rope_parameters": rope,
            "attention_bias": False,
            "mlp_bias": False,
            "vocab_size": self.vocab_size,
            "draft_vocab_size": self.draft_vocab_size,
            "tie_word_embeddings": False,
            "eagle_aux_hidden_state_layer_ids": list(self.aux_layers),
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": served_ids(self.aux_layers, self.keeps_ids),
                "use_aux_hidden_state": True,
            },
            "fc_norm": self.fc_norm,
            "norm_output": self.norm_output,
        }
        if self.mla:
            config |= vars(self.mla)
        else:
            config["head_dim"] = self.head_dim
        return config

    @classmethod
    def from_json(cls, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> "DrafterConfig":
        """The drafter of a published config.json; what it leaves out (layers, RoPE) is the target's.

        Raises:
            DrafterConfigError: another architecture, more than one layer, a switch that is not trained here, or a field
                that is missing or no number.
        """
        try:
            return cls._from_json(config, target_config)
        except DrafterConfigError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DrafterConfigError(
                f"The drafter's config.json cannot be used: {type(error).__name__} {error}."
            ) from None

    @classmethod
    def _from_json(cls, config: Mapping[str, Any], target_config: Mapping[str, Any]) -> "DrafterConfig":
        base = cls.from_target(target_config, draft_vocab_size=1)
        architecture = (config.get("architectures") or ["missing"])[0]
        mla = architecture == MLA
        if not mla and architecture not in (LLAMA, "Eagle3LlamaForCausalLM"):
            raise DrafterConfigError(f"architectures {architecture!r}: only {LLAMA} and {MLA} drafters are known.")
        eagle = config.get("eagle_config") or {}
        for field, value in {
            "num_hidden_layers": config.get("num_hidden_layers", 1) != 1,
            "norm_before_residual": config.get("norm_before_residual", False),
            "norm_before_fc": eagle.get("norm_before_fc", config.get("norm_before_fc", False)),
            "bias": config.get("bias", False),
        }.items():
            if value:
                raise DrafterConfigError(f"{field} {config.get(field)!r} of the drafter's config is not trained here.")
        ids, indices = (place.get("eagle_aux_hidden_state_layer_ids") for place in (eagle, config))
        layers = indices_of(ids, base.keeps_ids) if ids else tuple(sorted(indices or base.aux_layers))
        sizes = _mla_sizes(config, missing_q_rank=None) if mla else None
        has_rope = config.get("rope_parameters") or config.get("rope_theta")
        return cls(
            hidden_size=int(config["hidden_size"]),
            intermediate_size=int(config["intermediate_size"]),
            **_heads(config, sizes),
            rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=max(int(config.get("max_position_embeddings", 0)), base.max_position_embeddings),
            rope=_rope_of(config) if has_rope else base.rope,
            vocab_size=int(config["vocab_size"]),
            draft_vocab_size=int(config.get("draft_vocab_size") or config["vocab_size"]),
            aux_layers=layers,
            fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
            norm_output=bool(config.get("norm_output", False)),
            mla=sizes,
            keeps_ids=base.keeps_ids,
        )


def _heads(config: Mapping[str, Any], mla: MLASizes | None) -> dict[str, int]:
    """In latent attention every head has keys of its own, whatever the config says of them."""
    heads = int(config["num_attention_heads"])
    if mla:
        keys, width = heads, mla.qk_nope_head_dim + mla.qk_rope_head_dim
    else:
        keys = int(config.get("num_key_value_heads") or heads)
        width = int(config.get("head_dim") or int(config["hidden_size"]) // heads)
    return {"num_attention_heads": heads, "num_key_value_heads": keys, "head_dim": width}


def _mla_sizes(config: Mapping[str, Any], missing_q_rank: int | None) -> MLASizes:
    """`missing_q_rank`: DeepSeek-V2-Lite has none, and SGLang's drafter must have one."""
    fields = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    q_rank = config.get("q_lora_rank") or missing_q_rank
    if q_rank is None:
        raise DrafterConfigError("q_lora_rank is missing: SGLang's MLA drafter cannot be without it.")
    return MLASizes(int(q_rank), *(int(config[field]) for field in fields))


def _rope_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """transformers-5 rope_parameters of a config of either generation.

    Of a target with RoPE by layer kind it is full attention's. Sections of multimodal RoPE and partial rotation are the
    target layers' own affair: text positions are the same in every section.
    """
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = dict(parameters.get("full_attention", parameters))
    kind = parameters.pop("type", None)
    parameters.setdefault("rope_type", kind or "default")
    parameters.setdefault("rope_theta", config.get("rope_theta", 10000.0))
    if parameters["rope_type"] in ("mrope", "deepseek_yarn"):
        parameters["rope_type"] = "default" if parameters["rope_type"] == "mrope" else "yarn"
    dropped = ("mrope_section", "mrope_interleaved", "partial_rotary_factor")
    return {name: value for name, value in parameters.items() if name not in dropped}
