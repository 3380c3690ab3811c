#!/usr/bin/env python3
"""Offline embeddings: Pagoda compared with sentence-transformers on torch and with ONNX Runtime, in speed and accuracy.

    python bench/embeddings.py                              # texts of 128 tokens, random weights, texts a second
    python bench/embeddings.py --accuracy MODEL             # real weights: least cosine per dtype, over texts of docs/
    python bench/embeddings.py --accuracy MODEL --judged STS.tsv    # and how each ranks pairs that people scored

All sides run in this process with the same number of threads, one after the other in every round, in rotating order,
each once the threads of the one before are idle; the figures to quote are ratios within a round, of which the median is
printed. If sentence-transformers is not installed, transformers' model with the same pooling replaces it, and the table
says so. All texts have the same length, so nothing is padded; the others run with several dtypes and batch sizes, and
the best batch size counts for each dtype. ONNX Runtime, which fastembed uses, takes part if `onnx` and `onnxruntime`
are installed: the same model after its optimiser, in float32, and with int8 weights from its own dynamic quantisation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

# A worker restricts torch's libraries to batch-invariant kernels (`pagoda_worker.library_choice`). Its native kernels
# need no such restriction, which in this process would slow down the others, too.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "ALL")
os.environ.setdefault("MKL_CBWR", "AUTO")

import torch

ROOT = Path(__file__).parents[1]
SHAPES = {
    "minilm-l6": {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536},
    "bge-small": {"hidden_size": 384, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 1536},
}
VOCAB = 30_522
SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
BATCHES = (16, 64)  # batch sizes of the other sides
LEAST_TEXTS = 200
SETTLE_S = 0.05  # between two looks at the processor time taken
MOST_BUSY = 0.1  # cores
MOST_LOOKS = 40
Vectors = Callable[[list[str]], Any]


def make_model(root: Path, shape: str) -> Path:
    """A BERT of this shape with random weights, and sentence-transformers' files: mean pooling, normalised."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    path = root / shape
    config = BertConfig(vocab_size=VOCAB, max_position_embeddings=512, **SHAPES[shape])
    BertModel(config, add_pooling_layer=False).save_pretrained(path)
    words = [*SPECIALS, *(f"w{i}" for i in range(VOCAB - len(SPECIALS)))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIALS))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(path / "tokenizer.json"))
    named = {f"{name}_token": f"[{name.upper()}]" for name in ("pad", "unk", "cls", "sep", "mask")}
    _write(path / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **named})
    kinds = (("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize"))
    listed = [
        {"idx": i, "name": str(i), "path": place, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, place) in enumerate(kinds)
    ]
    _write(path / "modules.json", listed)
    _write(path / "sentence_bert_config.json", {"max_seq_length": 512, "do_lower_case": False})
    (path / "2_Normalize").mkdir()
    _write(path / "1_Pooling/config.json", {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True})
    return path


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def made_texts(count: int, tokens: int) -> list[str]:
    """Texts of exactly `tokens` tokens, including the two special tokens around them."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB - len(SPECIALS), (count, tokens - 2), generator=generator)
    return [" ".join(f"w{i}" for i in row) for row in ids.tolist()]


def pagoda(path: Path, threads: int, **options: Any) -> Vectors:
    from pagoda import LLM

    llm = LLM(str(path), threads=threads, **options)
    return lambda texts: [one.outputs.embedding for one in llm.embed(texts, use_tqdm=False, truncate_prompt_tokens=-1)]


def theirs(path: Path, dtype: torch.dtype, batch: int) -> Vectors:
    if find_spec("sentence_transformers") is None:
        return by_transformers(path, dtype, batch)
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(path), device="cpu", model_kwargs={"dtype": dtype})
    return lambda texts: model.encode(texts, batch_size=batch, convert_to_tensor=True, show_progress_bar=False)


def by_transformers(path: Path, dtype: torch.dtype, batch: int) -> Vectors:
    """The normalised mean of all tokens' states."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModel.from_pretrained(path, dtype=dtype).eval()

    def read(texts: list[str]) -> torch.Tensor:
        given = tokenizer(texts, padding=True, truncation=True, max_length=_longest(path), return_tensors="pt")
        states = model(**given).last_hidden_state.float()
        return _mean(states, given["attention_mask"])

    def vectors(texts: list[str]) -> torch.Tensor:
        with torch.inference_mode():
            return torch.cat([read(texts[i : i + batch]) for i in range(0, len(texts), batch)])

    return vectors


class States(torch.nn.Module):
    """A wrapper through which the exporter sees only tensors."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.model(input_ids=ids, attention_mask=mask).last_hidden_state


def export(path: Path) -> dict[str, Path]:
    """The model as ONNX files with the optimiser's fused operations: in float32, and with int8 weights.

    Exporter and attention implementation are chosen so that the optimiser recognises the graph: an unoptimised graph
    would be slower than what people run.
    """
    from onnx import TensorProto
    from onnxruntime.quantization import QuantType, quantize_dynamic
    from onnxruntime.transformers.optimizer import optimize_model
    from transformers import AutoModel

    model = AutoModel.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    config, ids = model.config, torch.ones((2, 8), dtype=torch.long)
    files = {name: path / f"{name}.onnx" for name in ("exported", "float32", "int8")}
    names = ["input_ids", "attention_mask"]
    axes = {name: {0: "texts", 1: "tokens"} for name in (*names, "states")}
    torch.onnx.export(
        States(model), (ids, ids), str(files["exported"]), input_names=names, output_names=["states"],
        dynamic_axes=axes, dynamo=False,
    )  # fmt: skip
    fused = optimize_model(str(files["exported"]), "bert", config.num_attention_heads, config.hidden_size, opt_level=1)
    if fused.get_fused_operator_statistics()["Attention"] != config.num_hidden_layers:
        raise RuntimeError("the optimiser did not know this model's attention, so there is nothing to compare with")
    fused.save_model_to_file(str(files["float32"]))
    known = {"DefaultTensorType": TensorProto.FLOAT}  # it cannot infer the output types of fused operations
    quantize_dynamic(files["float32"], files["int8"], weight_type=QuantType.QInt8, extra_options=known)
    return {name: files[name] for name in ("float32", "int8")}


def by_onnx_runtime(path: Path, file: Path, threads: int, batch: int) -> Vectors:
    """Like `by_transformers`, with ONNX Runtime."""
    import onnxruntime
    from transformers import AutoTokenizer

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    tokenizer = AutoTokenizer.from_pretrained(path)

    def read(texts: list[str]) -> torch.Tensor:
        given = tokenizer(texts, padding=True, truncation=True, max_length=_longest(path), return_tensors="np")
        inputs = {name: given[name] for name in ("input_ids", "attention_mask")}
        states = torch.from_numpy(session.run(None, inputs)[0])
        return _mean(states, torch.from_numpy(given["attention_mask"]))

    return lambda texts: torch.cat([read(texts[i : i + batch]) for i in range(0, len(texts), batch)])


def _mean(states: torch.Tensor, attended: torch.Tensor) -> torch.Tensor:
    mask = attended[..., None]
    return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)


def _longest(path: Path) -> int:
    return int(json.loads((path / "sentence_bert_config.json").read_text())["max_seq_length"])


def sides(path: Path, threads: int) -> dict[str, Vectors]:
    found = {
        "pagoda bfloat16": pagoda(path, threads, dtype="bfloat16"),
        "pagoda int8": pagoda(path, threads, dtype="bfloat16", quantization="int8"),
    }
    torch.set_num_threads(threads)
    library = "torch" if find_spec("sentence_transformers") is None else "sentence-transformers"
    for dtype in (torch.float32, torch.bfloat16):
        for batch in BATCHES:
            found[f"{library} {str(dtype).removeprefix('torch.')} x{batch}"] = theirs(path, dtype, batch)
    if all(map(find_spec, ("onnx", "onnxruntime"))):
        for dtype, file in export(path).items():
            found |= {f"onnxruntime {dtype} x{batch}": by_onnx_runtime(path, file, threads, batch) for batch in BATCHES}
    return found


def measured(found: dict[str, Vectors], texts: list[str], rounds: int) -> dict[str, list[float]]:
    """Texts per second of each side in each round, after one round that is not counted."""
    names = list(found)
    rates: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(rounds + 1):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            settle()
            begin = time.perf_counter()
            found[name](texts)
            if turn:
                rates[name].append(len(texts) / (time.perf_counter() - begin))
    return rates


def settle() -> None:
    """Wait until this process hardly computes: some libraries' threads spin for a while after a call, waiting for the
    next. Raises SystemExit if they never stop."""
    for _ in range(MOST_LOOKS):
        before = time.process_time()
        time.sleep(SETTLE_S)
        if time.process_time() - before <= MOST_BUSY * SETTLE_S:
            return
    raise SystemExit(f"threads spin for more than {MOST_LOOKS * SETTLE_S:.0f} s after a call; is OMP_WAIT_POLICY set?")


def show(shape: str, tokens: int, rates: dict[str, list[float]]) -> dict[str, Any]:
    """Print a line per side; Pagoda's also show their ratios per round to each other side at its best batch size."""
    others: dict[str, list[list[float]]] = {}
    for name, values in rates.items():
        if not name.startswith("pagoda"):
            others.setdefault(name.rpartition(" ")[0], []).append(values)
    best = {name: [max(values) for values in zip(*several, strict=True)] for name, several in others.items()}
    told: dict[str, Any] = {"shape": shape, "tokens": tokens, "rates": rates, "ratios": {}}
    print(f"\n{shape}, texts of {tokens} tokens")
    for name, values in rates.items():
        rate = statistics.median(values)
        print(f"  {name:36} {rate:8.1f} texts/s {tokens * rate:10.0f} tokens/s")
        for other, rival in best.items() if name.startswith("pagoda") else ():
            ratios = [one / its for one, its in zip(values, rival, strict=True)]
            told["ratios"][f"{name} / {other}"] = ratios
            print(f"    {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) of {other}")
    return told


def own_texts(least: int) -> list[str]:
    """Lines of this repository's documents, from a few words to a table row."""
    parts = [part.strip() for file in sorted((ROOT / "docs").rglob("*.md")) for part in file.read_text().split("\n")]
    found = [part for part in parts if len(part) > 40]
    if len(found) < least:
        raise SystemExit(f"docs/ has {len(found)} lines, and {least} are needed")
    return found[:: len(found) // least][: 2 * least]


def judged_pairs(file: Path) -> list[tuple[float, str, str]]:
    """Pairs of texts that people scored: lines of score, text, text, apart by tabs; what follows on a line is ignored.

    SemEval publishes scores and texts in files of their own, which `paste` puts together. Lines without a score are
    left out: pairs that are not part of the evaluation have none. Raises SystemExit.
    """
    found = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except (OSError, ValueError) as error:
        raise SystemExit(f"{file}: {error}") from None
    for number, line in enumerate(lines, 1):
        score, *texts = line.rstrip("\r").split("\t")
        if not score.strip():
            continue
        try:
            value = float(score)
        except ValueError:
            value = math.nan
        if not math.isfinite(value) or len(texts) < 2:
            raise SystemExit(f"{file}, line {number}: a score and two texts are wanted, got {line[:60]!r}")
        found.append((value, texts[0], texts[1]))
    if len({score for score, *_ in found}) < 2:
        raise SystemExit(f"{file}: pairs with at least two different scores are wanted")
    return found


def ranks(values: Sequence[float]) -> torch.Tensor:
    """1 for the smallest; equal values share the mean of their ranks. Float64, [len(values)]."""
    _, place, count = torch.tensor(values, dtype=torch.float64).unique(return_inverse=True, return_counts=True)
    shared: torch.Tensor = count.cumsum(0) - (count - 1) / 2
    return shared[place]


def rank_correlation(vectors: Vectors, pairs: Sequence[tuple[float, str, str]]) -> float:
    """Spearman's, of the pairs' cosines with their scores."""
    scores, first, second = zip(*pairs, strict=True)
    left, right = (torch.as_tensor(vectors(list(texts))).float() for texts in (first, second))
    cosines = torch.nn.functional.cosine_similarity(left, right, dim=-1)
    return float(torch.corrcoef(torch.stack([ranks(scores), ranks(cosines.tolist())]))[0, 1])


def accuracy(path: Path, threads: int, files: Sequence[Path]) -> dict[str, Any]:
    texts, judged = own_texts(LEAST_TEXTS), {str(file): judged_pairs(file) for file in files}
    reference = theirs(path, torch.float32, 16)
    expected = torch.as_tensor(reference(texts)).float()
    told: dict[str, Any] = {"texts": len(texts), "reference": _rankings(reference, judged)}
    formats: Sequence[dict[str, str]] = ({"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantization": "int8"})
    print(f"\ncosine with float32 on torch, of {len(texts)} texts; how many have the same bits alone")
    for options in formats:
        ours = pagoda(path, threads, **{"dtype": "bfloat16", **options})
        found = torch.tensor(ours(texts))
        cosines = torch.nn.functional.cosine_similarity(found, expected, dim=-1)
        same = sum(torch.equal(torch.tensor(ours([text])[0]), found[i]) for i, text in enumerate(texts))
        name = options.get("quantization") or options["dtype"]
        told[name] = {"least": float(cosines.min()), "mean": float(cosines.mean()), "same_alone": same}
        told[name]["rank_correlation"] = _rankings(ours, judged)
        print(f"  {name:10} least {cosines.min():.6f}   mean {cosines.mean():.6f}   alone {same} of {len(texts)}")
    for file, pairs in judged.items():
        print(f"\n{file}, rank correlation of cosines with people's scores, {len(pairs)} pairs")
        print(f"  {'float32 on torch':16} {told['reference'][file]:.4f}")
        for name in ("float32", "bfloat16", "int8"):
            print(f"  {name:16} {told[name]['rank_correlation'][file]:.4f}")
    return told


def _rankings(vectors: Vectors, judged: dict[str, list[tuple[float, str, str]]]) -> dict[str, float]:
    return {file: rank_correlation(vectors, pairs) for file, pairs in judged.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--accuracy", type=Path, metavar="MODEL", help="a sentence-transformers model; nothing is timed"
    )
    parser.add_argument(
        "--judged", type=Path, metavar="TSV", action="append", default=[],
        help="with --accuracy: score, text, text on each line; may be repeated",
    )  # fmt: skip
    parser.add_argument("--shape", choices=SHAPES, action="append", help="[all of them]")
    parser.add_argument("--texts", type=int, default=256, help="[%(default)s]")
    parser.add_argument("--tokens", type=int, default=128, help="of each [%(default)s]")
    parser.add_argument("--rounds", type=int, default=5, help="[%(default)s]")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="[%(default)s]")
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.judged and given.accuracy is None:
        parser.error("--judged needs --accuracy")
    told: list[dict[str, Any]] = []
    if given.accuracy is not None:
        told.append(accuracy(given.accuracy, given.threads, given.judged))
    else:
        texts = made_texts(given.texts, given.tokens)
        with tempfile.TemporaryDirectory() as root:
            for shape in given.shape or SHAPES:
                found = sides(make_model(Path(root), shape), given.threads)
                told.append(show(shape, given.tokens, measured(found, texts, given.rounds)))
    if given.json is not None:
        given.json.write_text(json.dumps(told))


if __name__ == "__main__":
    main()
