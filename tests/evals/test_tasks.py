"""lm-eval runs on the model that is loaded, and what it reports can be computed by hand."""

from __future__ import annotations

import io
import json
import logging
import math

import pytest
import torch

import mxquant.bundled
from mxquant.errors import MXQuantError
from mxquant.evals.models import load_model
from mxquant.evals.quiet import BarsAsLines
from mxquant.evals.tasks import TaskSet

ITEMS = [
    ("Return the number of", ["items in the list", "purple the the of"], 0),
    ("Raise an error if the", ["zebra", "value is not valid"], 1),
    ("This function returns a", ["under over and", "list of strings"], 1),
    ("class Thread(", ["object)", "why?"], 1),
    ("The default value is", ["None", "None None"], 0),
    ("Open the file for", ["reading and writing", "reading"], 0),
    ("A dictionary maps keys to", ["values", "while"], 0),
    ("If the argument is", ["a string", "on Tuesday morning"], 1),
]

_TASK = """\
task: {name}
dataset_path: {dataset}
dataset_kwargs:
  cache_dir: {folder}/cache
  data_files:
    validation: {folder}/items.jsonl
validation_split: validation
output_type: multiple_choice
doc_to_text: "{{{{ctx}}}}"
doc_to_choice: "{{{{endings}}}}"
doc_to_target: "{{{{label}}}}"
metric_list:
  - metric: acc
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = [json.dumps({"ctx": ctx, "endings": endings, "label": label}) for ctx, endings, label in ITEMS]
    (folder / "items.jsonl").write_text("\n".join(rows))
    (folder / "local.yaml").write_text(_TASK.format(name="local_items", dataset="json", folder=folder))
    remote = _TASK.format(name="remote_items", dataset="nobody/has-this", folder=folder)
    (folder / "remote.yaml").write_text("\n".join(line for line in remote.splitlines() if "jsonl" not in line))
    (folder / "broken.yaml").write_text("task: broken_items\ndataset_path: json\noutput_type: no_such_type\n")
    return folder


@pytest.fixture(scope="module")
def model():
    return load_model(mxquant.bundled.path(), device="cpu", dtype="float32")


def log_likelihood(model, context: str, continuation: str) -> float:
    """Log-probability of a continuation after its context, in nats."""
    tokens = model.tokenizer(f"{context} {continuation}", return_tensors="pt")["input_ids"]
    start = len(model.tokenizer(context)["input_ids"])
    with torch.no_grad():
        logs = model.model(tokens).logits[0, :-1].log_softmax(-1)
    return logs.gather(-1, tokens[0, 1:, None])[start - 1 :].sum().item()


def test_accuracy_is_that_of_the_models_own_log_likelihoods(model, folder):
    scores = [[log_likelihood(model, ctx, ending) for ending in endings] for ctx, endings, _ in ITEMS]
    right = [max(range(2), key=s.__getitem__) == label for s, (_, _, label) in zip(scores, ITEMS, strict=True)]
    assert 0 < sum(right) < len(right)
    tasks = TaskSet(["local_items"], folder)
    (metric,) = tasks.run(model)
    assert (metric.task, metric.name, metric.higher_is_better) == ("local_items", "acc", True)
    accuracy = sum(right) / len(right)
    assert metric.value == pytest.approx(accuracy)
    assert metric.stderr == pytest.approx(math.sqrt(accuracy * (1 - accuracy) / (len(right) - 1)))
    # The same tasks run again, as they do for the next model, and with other settings.
    assert tasks.run(model, batch_size=3) == [metric]
    assert tasks.run(model, limit=3)[0].value == pytest.approx(sum(right[:3]) / 3)


def test_a_yaml_file_is_a_task(folder, model):
    assert TaskSet([str(folder / "local.yaml")]).run(model, limit=2)[0].task == "local_items"


@pytest.mark.parametrize(
    ("names", "include", "message"),
    [
        ([" "], True, "no tasks given"),
        (["local_items"], "nowhere", "--include-path nowhere is not a folder"),
        (["remote_items"], True, "'remote_items' needs data from the hub"),
        (["broken_items"], True, "cannot load task 'broken_items'"),
    ],
)
def test_tasks_that_cannot_run_are_one_line(names, include, message, folder):
    with pytest.raises(MXQuantError, match=message) as caught:
        TaskSet(names, folder if include is True else include)
    assert "\n" not in str(caught.value)


def test_an_unknown_task_is_answered_with_names_like_it(folder):
    with pytest.raises(MXQuantError, match=r"unknown task 'helaswag': did you mean hellaswag"):
        TaskSet(["helaswag"], folder)


def test_nothing_reaches_standard_output_and_loggers_are_left_alone(model, folder, capsys):
    before = logging.getLogger("lm_eval").level
    TaskSet(["local_items"], folder).run(model, limit=1)
    assert capsys.readouterr().out == ""
    assert logging.getLogger("lm_eval").level == before


def test_bars_in_a_file_are_a_line_every_ten_seconds():
    now, out = 0.0, io.StringIO()
    stream = BarsAsLines(out, clock=lambda: now)
    for second in range(35):
        now = float(second)
        stream.write(f"\r{second} of 35")
    for text in ("\n", "a remark", "\n", "\r1 of 2", "another", "\n"):
        stream.write(text)
    assert out.getvalue() == "10 of 35\n20 of 35\n30 of 35\na remark\nanother\n"
