"""Tasks of every kind on packed models: what lm-eval measures on the dense twin, item by item.

The twin is the checkpoint that the packed one stands for; transformers alone loads it, lm-eval's own
model runs it.
"""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

import mxquant
import mxquant.bundled
from mxquant.cli.main import main
from mxquant.evals.models import load_model
from mxquant.evals.tasks import TaskSet

pytestmark = pytest.mark.usefixtures("one_thread")

BUNDLED = str(mxquant.bundled.path())
PROMPTS = [
    *("Return the number of", "Raise an error if the", "This function returns a", "The default value is"),
    *("A dictionary maps keys to", "If the argument is", "Changed in version", "The following example shows how"),
]
CHOICES = [["items", "zebra"], ["sky", "value is"], ["list of", "under"], ["None", "why"]]

_DATA = """\
dataset_path: json
dataset_kwargs:
  cache_dir: {folder}/cache
  data_files:
    test: {folder}/{name}.jsonl
test_split: test
"""
_KINDS = {
    "words": """\
output_type: loglikelihood
doc_to_text: "{{q}}"
doc_to_target: " {{a}}"
metric_list: [{metric: acc}, {metric: perplexity}]
""",
    "choices": """\
output_type: multiple_choice
doc_to_text: "{{q}}"
doc_to_choice: "{{c}}"
doc_to_target: "{{label}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "texts": """\
output_type: generate_until
doc_to_text: "{{q}}"
doc_to_target: "{{a}}"
generation_kwargs: {until: ["\\n"], max_gen_toks: 6, do_sample: false}
metric_list: [{metric: exact_match}]
""",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A packed model, its dense twin, and tasks of which the twin gets some items right."""
    folder = tmp_path_factory.mktemp("tasks")
    mxquant.quantize_model(BUNDLED, folder / "packed", "ue5m3/16")
    mxquant.dequantize_model(folder / "packed", folder / "dense", dtype=torch.float32)
    model = AutoModelForCausalLM.from_pretrained(folder / "dense", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder / "dense")
    rows: dict[str, list[dict]] = {"words": [], "choices": [], "texts": []}
    for number, prompt in enumerate(PROMPTS):
        tokens = tokenizer(prompt, return_tensors="pt")["input_ids"]
        made = model.generate(tokens, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, tokens.shape[1] :]
        text = tokenizer.decode(made).split("\n")[0]
        rows["texts"].append({"q": prompt, "a": text if number % 2 else "something else"})
        word = text.split()[0] if text.split() and number % 3 else "purple"
        rows["words"].append({"q": prompt, "a": word})
        rows["choices"].append({"q": prompt, "c": CHOICES[number % 4], "label": number % 2})
    for name, kind in _KINDS.items():
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows[name])))
        (folder / f"{name}.yaml").write_text(f"task: {name}\n{_DATA.format(folder=folder, name=name)}{kind}")
    return folder


@pytest.fixture(scope="module")
def theirs(folder):
    """lm-eval's results on the dense twin, samples included."""
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    model = HFLM(pretrained=str(folder / "dense"), dtype="float32", device="cpu", batch_size=1)
    manager = TaskManager(include_path=str(folder), include_defaults=False)
    return simple_evaluate(model, tasks=list(_KINDS), task_manager=manager, bootstrap_iters=0)


@pytest.mark.parametrize("name", list(_KINDS))
def test_a_packed_model_is_measured_as_its_dense_twin(name, folder, theirs):
    packed = load_model(folder / "packed", dtype="float32", device="cpu")
    assert packed.bits_per_weight == pytest.approx(4.5)
    metrics = TaskSet([name], folder).run(packed)
    expected = {key.split(",")[0]: v for key, v in theirs["results"][name].items() if key.endswith(",none")}
    assert {m.name for m in metrics} == {key for key in expected if not key.endswith("_stderr")}
    for metric in metrics:
        assert metric.value == pytest.approx(expected[metric.name], rel=1e-4)
        samples = [sample[metric.name] for sample in theirs["samples"][name]]
        if metric.name == "perplexity":
            assert metric.items is None  # no mean of its items
        else:
            assert metric.items == tuple(samples)
            assert 0 < metric.value < 1, "a task that is all right or all wrong tells nothing"


def test_differences_stand_beside_the_baselines_with_paired_errors(folder):
    arguments = ("--baseline", BUNDLED, "--no-perplexity", "--include-path", folder, "--device", "cpu")
    mxquant.quantize_model(BUNDLED, folder / "rough", "e8m0/128", overwrite=True)
    limit = ("--max-accuracy-drop", "99%", "--output", folder / "out.json")
    command = ["eval", folder / "rough", *arguments, "--tasks", "choices,words", *limit]
    result = CliRunner().invoke(main, [*map(str, command)])
    assert result.exit_code == 0, result.stderr
    dense, rough = json.loads((folder / "out.json").read_text())["models"]
    tasks = TaskSet(["choices"], folder)
    base, model = (tasks.run(load_model(source, device="cpu"))[0] for source in (BUNDLED, folder / "rough"))
    gained = sum(m > b for m, b in zip(model.items, base.items, strict=True))
    lost = sum(m < b for m, b in zip(model.items, base.items, strict=True))
    assert gained + lost, "the error would be zero"
    n = len(PROMPTS)
    # The error of a difference of two proportions on the same items, from those that changed.
    error = math.sqrt(((gained + lost) - (gained - lost) ** 2 / n) / (n * (n - 1)))
    found = rough["tasks"]["choices"]["acc"]
    assert found["difference"] == pytest.approx({"value": (gained - lost) / n, "stderr": error})
    assert found["value"] - dense["tasks"]["choices"]["acc"]["value"] == pytest.approx(found["difference"]["value"])
    assert dense["tasks"]["choices"]["acc"]["difference"] is None
    assert rough["tasks"]["words"]["perplexity"]["difference"]["stderr"] is None
    cells = next(line.split() for line in result.stdout.splitlines() if line.split()[:3] == ["choices", "acc", "rough"])
    shown = [f"{x:.4f}" for x in (found["value"], found["stderr"])]
    assert cells[3:] == [shown[0], "±", shown[1], f"{(gained - lost) / n:+.4f}", "±", f"{error:.4f}"]


def test_a_tasks_hash_is_that_of_what_it_asks(folder, tmp_path):
    def hash_of(kind=_KINDS["words"], rows=({"q": "a", "a": "b"}, {"q": "c", "a": "d"}), place="x", **options):
        where = tmp_path / place
        where.mkdir(exist_ok=True)
        (where / "words.jsonl").write_text("\n".join(map(json.dumps, rows)))
        (where / "words.yaml").write_text(f"task: words\n{_DATA.format(folder=where, name='words')}{kind}")
        return TaskSet(["words"], where).hash("words", **options)

    before = hash_of()
    assert hash_of() == hash_of(place="elsewhere") == before
    assert hash_of(rows=({"q": "a", "a": "b"}, {"q": "c", "a": "e"}), place="y") != before
    assert hash_of(kind=_KINDS["words"].replace("{{q}}", "Q: {{q}}"), place="z") != before
    assert hash_of(num_fewshot=1) != before


def test_a_tasks_hash_is_the_same_in_another_process(tmp_path):
    """Functions of a task, which have another address there, included."""
    file = tmp_path / "items.jsonl"
    file.write_text('{"ctx": "A: b. c", "endings": ["d", "e"], "label": 0}')
    name = f"hellaswag={file}"
    code = f"from mxquant.evals.tasks import TaskSet; print(TaskSet([{name!r}]).hash({name!r}))"
    printed = [subprocess.check_output([sys.executable, "-c", code], text=True).strip() for _ in range(2)]
    assert printed == [TaskSet([name]).hash(name)] * 2


def test_known_tasks_are_not_run_again_and_new_items_are(folder, tmp_path, monkeypatch):
    ran = []
    run = TaskSet.run

    def remember(self, model, *, names, **options):
        ran.extend((model.name, name) for name in names)
        return run(self, model, names=names, **options)

    monkeypatch.setattr(TaskSet, "run", remember)
    texts = [{"text": "Return the number of items"}, {"text": "Raise an error"}]
    file = tmp_path / "lambada.jsonl"

    def evaluate(*tasks: str) -> list[dict]:
        file.write_text("\n".join(map(json.dumps, texts)))
        ran.clear()
        common = ("--no-perplexity", "--include-path", folder, "--device", "cpu", "--cache", tmp_path / "c", "--json")
        names = ",".join(tasks)
        result = CliRunner().invoke(main, [str(a) for a in ("eval", folder / "packed", "--tasks", names, *common)])
        assert result.exit_code == 0, result.stderr
        return json.loads(result.stdout)["models"]

    lambada = f"lambada={file}"
    evaluate("choices")
    assert ran == [("packed", "choices")]
    (row,) = evaluate(lambada, "choices")
    assert ran == [("packed", lambada)]
    assert list(row["tasks"]) == ["lambada", "choices"]
    assert [row["tasks"][task]["acc"]["cached"] for task in ("lambada", "choices")] == [False, True]
    assert evaluate(lambada, "choices")[0]["tasks"]["lambada"]["acc"]["cached"]
    assert ran == []
    texts.append({"text": "The default value"})
    evaluate(lambada, "choices")
    assert ran == [("packed", lambada)]
