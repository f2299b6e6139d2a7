"""Writes a checkpoint of random weights that every engine reads alike: published names, safetensors
shards, an index, a configuration and a tokenizer.

    python benchmarks/peers/checkpoint.py qwen3-30b-a3b-shape DIR
    python benchmarks/peers/checkpoint.py deepseek-v2-lite-shape DIR --mtp OTHER-DIR
    python benchmarks/peers/checkpoint.py qwen3-next-fp8-shape DIR --mtp DIR

Weights are normal with deviation 0.02, norms 1 and biases 0, as `--load-format dummy` makes them in
this engine: rows route evenly. MXFP4 experts have random codes and one scale, FP8 weights in blocks
normal codes and one scale. --layers writes the first layers of a shape alone.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).parent)]

from common import write_config  # noqa: E402

from specengine.kernels.linear.mxfp4 import BLOCK  # noqa: E402
from specengine.runner.loader.builtin import BUILTIN_MODELS  # noqa: E402
from specengine.runner.loader.tokenizer import byte_tokenizer  # noqa: E402

STD = 0.02
EXPONENT = 119  # of MXFP4 blocks, 2 ** -8: codes have a deviation of about 3
FP8_SCALE = 2**-10  # of FP8 blocks: codes have a deviation of about 20
SHARD = 2_000_000_000  # bytes of a file, about
_MTP_LAYER, _MTP_PROJECTION = "mtp.layers.0.", "mtp.fc"  # of Qwen3-Next
THREADS = 6  # each has a shard on the device and one on the host

Shapes = dict[str, Tensor]  # on the meta device, by published name


def fields_of(name: str) -> dict[str, Any]:
    """config.json of a built-in shape, or of a JSON file. Raises SystemExit."""
    if Path(name).is_file():
        found: dict[str, Any] = json.loads(Path(name).read_text())
        return found
    shapes = {one.name: one.config for one in BUILTIN_MODELS.values() if one.is_shape}
    if name not in shapes:
        sys.exit(f"{name}: neither a JSON file nor one of the shapes {', '.join(shapes)}")
    return shapes[name]


def first_layers(fields: dict[str, Any], count: int) -> dict[str, Any]:
    """The configuration of a model of the first `count` layers."""
    cut = {"num_hidden_layers": count}
    if "layer_types" in fields:
        cut["layer_types"] = fields["layer_types"][:count]
    return fields | cut


def published_shapes(fields: dict[str, Any]) -> Shapes:
    """What a published checkpoint of this configuration holds. Raises SystemExit for weights that
    are quantised otherwise than by MXFP4, or in blocks of FP8."""
    from transformers import AutoModelForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    quantised = fields.get("quantization_config", {})
    method = quantised.get("quant_method")
    if method not in (None, "mxfp4") and "weight_block_size" not in quantised:
        sys.exit(f"weights quantised by {method} are not written: those in MXFP4 or FP8 blocks are")
    config = _config({key: one for key, one in fields.items() if key != "quantization_config"})
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    tied = model.all_tied_weights_keys if config.tie_word_embeddings else ()
    found = revert_weight_conversion(model, model.state_dict())
    plain = {name: one for name, one in found.items() if name not in tied}
    if method is None:
        return plain
    return _in_mxfp4(plain) if method == "mxfp4" else _in_fp8_blocks(plain, quantised)


def _in_mxfp4(plain: Shapes) -> Shapes:
    """[E, K, N] of experts as blocks [E, N, K / 32, 16] and scales [E, N, K / 32]."""
    found: Shapes = {}
    for name, one in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            found[name] = one
            continue
        count, inputs, outputs = one.shape
        size = count, outputs, inputs // BLOCK
        found[f"{name}_blocks"] = one.new_empty((*size, BLOCK // 2), dtype=torch.uint8)
        found[f"{name}_scales"] = one.new_empty(size, dtype=torch.uint8)
    return found


def _in_fp8_blocks(plain: Shapes, quantised: dict[str, Any]) -> Shapes:
    """[N, K] of linear layers as codes, and scales of their blocks [N / rows, K / columns]."""
    rows, columns = quantised["weight_block_size"]
    kept = {"model.embed_tokens", "lm_head", *quantised.get("modules_to_not_convert", ())}
    found: Shapes = {}
    for name, one in plain.items():
        if one.dim() != 2 or not name.endswith(".weight") or name.removesuffix(".weight") in kept:
            found[name] = one
            continue
        size = -(-one.shape[0] // rows), -(-one.shape[1] // columns)
        found[name] = one.new_empty(one.shape, dtype=torch.float8_e4m3fn)
        found[f"{name}_scale_inv"] = one.new_empty(size, dtype=torch.float32)
    return found


def is_mtp_inside(fields: dict[str, Any]) -> bool:
    """Whether published checkpoints of the family have an MTP layer in the model's own folder,
    where the peers look for it."""
    return bool(fields["model_type"] == "qwen3_next")


def mtp_shapes(fields: dict[str, Any], target: Shapes) -> Shapes:
    """One MTP layer like the target's last, in Qwen3-Next's names for that family, else in
    DeepSeek-V3's, behind the last layer. Its embedding and head are the target's. Raises SystemExit
    where the last layer is none of attention."""
    count, hidden = fields["num_hidden_layers"], fields["hidden_size"]
    last, own = f"model.layers.{count - 1}.", f"model.layers.{count}."
    norms = [own + name for name in ("enorm", "hnorm", "shared_head.norm")]
    projection = f"{own}eh_proj"
    if is_mtp_inside(fields):
        own, projection = _MTP_LAYER, _MTP_PROJECTION
        norms = ["mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm"]
    layer = {own + name[len(last) :]: one for name, one in target.items() if name.startswith(last)}
    if not any(name.startswith(f"{own}self_attn.") for name in layer):
        sys.exit(f"layer {count} is none of attention, as an MTP layer is: take other --layers")
    norm = target["model.norm.weight"]
    ends = {f"{projection}.weight": norm.new_empty(hidden, 2 * hidden)}
    return {**layer, **{f"{name}.weight": norm for name in norms}, **ends}


def with_mtp_inside(fields: dict[str, Any]) -> dict[str, Any]:
    """The configuration of a model with its MTP layer in its own folder: what of that layer is not
    quantised, which vLLM asks for by its name."""
    quantised = fields.get("quantization_config")
    if quantised is None:
        return fields
    kept: list[str] = quantised["modules_to_not_convert"]
    last = f"model.layers.{fields['num_hidden_layers'] - 1}."
    like = [_MTP_LAYER + name[len(last) :] for name in kept if name.startswith(last)]
    changed = {"modules_to_not_convert": [*kept, _MTP_PROJECTION, *like]}
    return fields | {"quantization_config": quantised | changed}


def num_bytes(shapes: Shapes) -> int:
    return sum(one.numel() * one.element_size() for one in shapes.values())


def write_checkpoint(
    fields: dict[str, Any], shapes: Shapes, folder: Path, device: torch.device, seed: int = 0
) -> None:
    """Fill a folder that exists. What the weights are depends on the seed and the device's kind."""
    write_config(fields, folder)
    byte_tokenizer(fields["vocab_size"]).save_pretrained(folder)
    shards = [*_shards(shapes)]
    names = [
        f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        for number in range(1, len(shards) + 1)
    ]

    def write(number: int) -> None:
        _write_shard(folder / names[number], shards[number], device, seed + number)

    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(write, range(len(shards))))
    places = {name: file for file, one in zip(names, shards, strict=True) for name in one}
    index = {"metadata": {"total_size": num_bytes(shapes)}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def _config(fields: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**fields)


def _shards(shapes: Shapes) -> Iterator[Shapes]:
    """Neighbours together, in the order of the names' list."""
    shard: Shapes = {}
    for name, one in shapes.items():
        if shard and num_bytes({**shard, name: one}) > SHARD:
            yield shard
            shard = {}
        shard[name] = one
    yield shard


def _write_shard(path: Path, shapes: Shapes, device: torch.device, seed: int) -> None:
    from safetensors.torch import save_file

    generator = torch.Generator(device)
    generator.manual_seed(seed)
    made = {name: _random(name, one, generator).cpu() for name, one in shapes.items()}
    save_file(made, path, metadata={"format": "pt"})


def _random(name: str, shape: Tensor, generator: torch.Generator) -> Tensor:
    place = torch.empty_like(shape, device=generator.device)
    if name.endswith("_blocks"):
        return place.random_(0, 256, generator=generator)
    if name.endswith("_scales"):
        return place.fill_(EXPONENT)
    if name.endswith("_scale_inv"):
        return place.fill_(FP8_SCALE)
    if shape.dtype == torch.float8_e4m3fn:
        codes = torch.empty_like(place, dtype=torch.bfloat16)
        return codes.normal_(0.0, STD / FP8_SCALE, generator=generator).to(shape.dtype)
    if name.endswith("bias"):
        return place.zero_()
    return place.fill_(1.0) if place.dim() == 1 else place.normal_(0.0, STD, generator=generator)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("shape", help="a built-in shape, or a file like config.json")
    parser.add_argument("folder", type=Path, help="is made")
    parser.add_argument(
        "--mtp", type=Path, metavar="DIR", help="also an MTP layer, in another folder or the same"
    )
    parser.add_argument("--layers", type=int, help="the first ones alone")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    fields = fields_of(args.shape)
    if args.layers is not None:
        fields = first_layers(fields, args.layers)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    shapes = published_shapes(fields)
    parts = [(args.folder, shapes)]
    if args.mtp == args.folder:
        parts = [(args.folder, shapes | mtp_shapes(fields, shapes))]
        fields = with_mtp_inside(fields)
    elif args.mtp is not None:
        parts.append((args.mtp, mtp_shapes(fields, shapes)))
    for folder, one in parts:
        folder.mkdir(parents=True)
        write_checkpoint(fields, one, folder, device, args.seed)
        print(f"{folder}: {num_bytes(one) / 1e9:.1f} GB in {len(one)} tensors", flush=True)


if __name__ == "__main__":
    main()
