"""Training a multi-token-prediction layer for a target that came without one."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from specengine.core.errors import ConfigError
from specengine.core.options import option
from specengine.draft.mtp.form import DEEPSEEK, MtpLayerName
from specengine.draft.train.export import DTYPES, write_drafter
from specengine.draft.train.mtp import MtpDraft
from specengine.draft.train.teacher import Teacher
from specengine.draft.train.unroll import Borrowed, rotary_table
from specengine.draft.train.unrolled_task import UnrollConfig, UnrolledTask
from specengine.layers.rotary import rope_parameters
from specengine.runner.loader.loaded_model import LoadedModel


@dataclass(frozen=True, kw_only=True)
class MtpConfig(UnrollConfig):
    dtype: str = option("bfloat16", "of the exported weights", ("bfloat16", "float32"))


class MtpTask(UnrolledTask):
    """A draft.train.task.TrainTask, made by make_mtp_task."""

    name = "mtp"
    module: MtpDraft

    def __init__(self, module: MtpDraft, teacher: Teacher, config: MtpConfig) -> None:
        super().__init__(module, teacher, config)
        self.dtype = DTYPES[config.dtype]

    def export(self, directory: Path) -> None:
        """In DeepSeek-V3's form, the layer alone, behind the target's last."""
        target = self.teacher.config
        name = MtpLayerName(DEEPSEEK, target.num_hidden_layers)
        tensors = {name.tensor(own): one for own, one in self.module.named_parameters()}
        config = {**target.to_dict(), "num_nextn_predict_layers": 1}
        write_drafter(directory, tensors, config, self.dtype)


def make_mtp_task(loaded: LoadedModel, config: MtpConfig) -> MtpTask:
    """The layer is of the target's shape. Initial weights are drawn from torch's generator. Raises
    ConfigError."""
    teacher = Teacher(loaded, cache_mb=config.feature_cache_mb)
    model = cast(Any, loaded.model)
    shape = model.layer_specs(teacher.config)[-1]
    if shape.sliding_window is not None:
        raise ConfigError(
            "the target's last layer has a sliding window, which an MTP layer is not trained with; "
            "train eagle3 for it"
        )
    head = teacher.head_table().to(teacher.dtype)
    borrowed = Borrowed(
        teacher.embed_table, head, rotary_table(teacher, shape, rope_parameters(teacher.config))
    )
    module = MtpDraft(shape, borrowed, config.compiles_on(teacher.device))
    module.begin(teacher.final_norm().cpu())
    return MtpTask(module, teacher, config)
