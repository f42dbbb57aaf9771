"""Tasks with a file of the user's ask models what lm-eval's own tasks ask of the same documents."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

import mxquant.bundled
from mxquant.errors import MXQuantError
from mxquant.evals.local_tasks import rows
from mxquant.evals.models import load_model
from mxquant.evals.tasks import TaskSet

# In the columns of the published data: an unfinished sentence, none, and what preprocessing removes.
HELLASWAG = [
    {
        "activity_label": "Canoeing",
        "ctx_a": "Two women sit in a canoe. A man at St. Moritz waves, e.g. to them.",
        "ctx_b": "the women",
        "endings": ["paddle away.", "fly [substeps] home.", "eat  the canoe.", "are  gone."],
        "label": "0",
    },
    {
        "activity_label": "Home and Garden",
        "ctx_a": "[header] How to water a plant [title] Take a can. [step] Fill it with water.",
        "ctx_b": "",
        "endings": ["[title] Pour. [step] Slowly.", "Drink it.", "Sell the can.", "Stop."],
        "label": "3",
    },
    {
        "activity_label": "Rock climbing",
        "ctx_a": "Is that a rope? Yes!",
        "ctx_b": "a man from New York",
        "endings": ["climbs.", "falls up.", "is a rope.", "swims."],
        "label": "1",
    },
]
LAMBADA = [
    {"text": 'She looked at the sea.\n\n"It is the sea," she said, and went into the sea'},
    {"text": "Two  spaces and a comma, then the last, word"},
    {"text": "one two"},
]


def write(path, lines):
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def requests(task):
    """What a task asks: contexts, continuations and the right answers, in order."""
    task.build_all_requests()
    return [(i.args, i.idx, task.doc_to_target(i.doc)) for i in task.instances]


def own_task(path, split, documents, folder):
    """lm-eval's task itself, its data the published columns."""
    import lm_eval.tasks

    manager = lm_eval.tasks.TaskManager(include_defaults=False)
    path = Path(lm_eval.tasks.__file__).parent / path
    name = path.stem
    data = f"dataset_path: json\ndataset_name: null\ndataset_kwargs:\n  cache_dir: {folder}/cache\n  data_files:\n"
    splits = dict.fromkeys(("training_split", "validation_split", "test_split"), split)
    kept = "\n".join(f"{key}: {split if key == f'{split}_split' else 'null'}" for key in splits)
    file = write(folder / f"{name}.jsonl", documents)
    (folder / f"{name}.yaml").write_text(f"include: {path}\n{data}    {split}: {file}\n{kept}\n")
    return manager.load([str(folder / f"{name}.yaml")])["tasks"][name]


def local_task(name, file):
    ((task,),) = TaskSet([f"{name}={file}"])._tasks.values()
    return task


def joined(document):
    """A document of HellaSwag with its context as one text."""
    context = f"{document['activity_label']}: {document['ctx_a']} {document['ctx_b']}".strip()
    return {"ctx": context, "endings": document["endings"], "label": int(document["label"])}


@pytest.mark.parametrize("shape", [dict, joined])
def test_hellaswag_asks_what_lm_evals_own_task_asks(shape, tmp_path):
    own = own_task("hellaswag/hellaswag.yaml", "validation", HELLASWAG, tmp_path)
    local = local_task("hellaswag", write(tmp_path / "mine.jsonl", map(shape, HELLASWAG)))
    asked = requests(own)
    assert len(asked) == 4 * len(HELLASWAG)
    assert asked[0][0] == ("Canoeing: " + HELLASWAG[0]["ctx_a"] + " The women", " paddle away.")
    found = requests(local)
    assert [ask[:2] for ask in found] == [ask[:2] for ask in asked]
    right = [int(document["label"]) for document in HELLASWAG for _ in range(4)]
    assert [int(gold) for *_, gold in found] == [int(gold) for *_, gold in asked] == right
    assert {m: local.higher_is_better()[m] for m in ("acc", "acc_norm")} == own.higher_is_better()


def test_lambada_asks_what_lm_evals_own_task_asks(tmp_path):
    own = own_task("lambada/lambada_openai.yaml", "test", LAMBADA, tmp_path)
    local = local_task("lambada", write(tmp_path / "mine.jsonl", LAMBADA))
    assert requests(local) == requests(own)
    assert requests(local)[1][0] == ("Two  spaces and a comma, then the last,", " word")
    assert local.higher_is_better() == own.higher_is_better()
    assert local.aggregation().keys() == own.aggregation().keys() == {"acc", "perplexity"}


@pytest.fixture(scope="module")
def model():
    return load_model(mxquant.bundled.path(), device="cpu", dtype="float32")


def test_results_are_those_of_lm_evals_own_task(model, tmp_path):
    from lm_eval import simple_evaluate
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager

    words = ["return", "the", "value", "of", "a", "list", "or", "raise", "an", "error", "if", "there", "is", "none"]
    random.seed(0)
    texts = [{"text": " ".join(random.choices(words, k=9))} for _ in range(12)]
    metrics = TaskSet([f"lambada={write(tmp_path / 'mine.jsonl', texts)}"]).run(model)
    own = own_task("lambada/lambada_openai.yaml", "test", texts, tmp_path)
    wrapped, manager = HFLM(pretrained=model.model, tokenizer=model.tokenizer), TaskManager(include_defaults=False)
    theirs = simple_evaluate(wrapped, tasks=[own], bootstrap_iters=0, task_manager=manager)
    expected = theirs["results"]["lambada_openai"]
    assert {m.name: m.value for m in metrics} == {name: expected[f"{name},none"] for name in ("acc", "perplexity")}
    assert {m.task for m in metrics} == {"lambada"}


def test_every_task_here_can_be_named_and_shipped():
    assert rows.names() == ["hellaswag", "lambada"]
    assert all(rows.definition(name).is_file() for name in rows.names())


@pytest.mark.parametrize(
    ("task", "content", "message"),
    [
        ("hellaswag", None, "no task file"),
        ("hellaswag", "\n \n", "is empty"),
        ("hellaswag", "{", "line 1: Expecting property name"),
        ("hellaswag", "\n[1]", "line 2: not a JSON object"),
        ("hellaswag", '{"endings": ["a", "b"]}', "line 1: there is no 'label'"),
        ("hellaswag", '{"ctx": "A: b", "endings": ["a", "b"], "label": 2}', "label 2 is not the index of one of 2"),
        ("hellaswag", '{"ctx": "A: b", "endings": "ab", "label": 0}', "endings is not a list of texts"),
        ("hellaswag", '{"ctx": "no activity", "endings": ["a", "b"], "label": 0}', "an activity and a colon"),
        ("lambada", '{"text": "two words"}\n{"text": 1}', "line 2: text is not a text"),
        ("lambada", '{"text": "word"}', "line 1: text has no last word"),
        ("piqa", '{"text": "two words"}', "a file goes with the tasks hellaswag and lambada, not with 'piqa'"),
    ],
)
def test_files_that_cannot_be_used_are_one_line(task, content, message, tmp_path):
    file = tmp_path / "file.jsonl"
    if content is not None:
        file.write_text(content)
    with pytest.raises(MXQuantError, match=message) as caught:
        TaskSet([f"{task}={file}"])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [["lambada=a", "lambada=b"], ["piqa", "piqa"], ["hellaswag=a", "hellaswag"]])
def test_a_task_given_twice_is_refused(names):
    with pytest.raises(MXQuantError, match="is given twice"):
        TaskSet(names)


def test_nothing_is_written_and_nobody_is_asked(tmp_path):
    """No cache of `datasets`, no look at the network."""
    file = write(tmp_path / "mine.jsonl", LAMBADA)
    code = (
        "import socket, sys\n"
        "def refuse(*a): raise AssertionError(f'a connection to {a[1]}')\n"
        "socket.socket.connect = refuse\n"
        "from mxquant.evals.tasks import TaskSet\n"
        f"TaskSet(['lambada={file}'])\n"
    )
    environment = {"HOME": str(tmp_path / "home"), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert not list((tmp_path / "home").rglob("*.arrow"))
