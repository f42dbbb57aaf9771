"""The model card: what the hub reads of it, what people read in it, and that its examples run."""

from __future__ import annotations

import json
import re
import shutil

import pytest
import yaml
from click.testing import CliRunner

import mxquant
import mxquant.bundled
from mxquant.checkpoint import upload
from mxquant.cli.main import main
from mxquant.convert.card.files import restore_card, write_card
from mxquant.convert.card.front_matter import is_ours
from mxquant.convert.card.text import hub_id, model_card
from mxquant.errors import CheckpointError, MXQuantError

BUNDLED = mxquant.bundled.path()
SOURCE_CARD = """---
license: other
license_name: my-terms
license_link: https://example.org/terms
language: [en, de]
pipeline_tag: text-generation
tags: [chat, mxquant]
datasets: [secret]
---
# The source
"""


def run(*args):
    return CliRunner().invoke(main, [str(a) for a in args])


def matter(card):
    head = re.match(r"---\n(.*?)\n---\n", card, re.DOTALL)
    assert head
    return yaml.safe_load(head[1])


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """The bundled model in both on-disk formats, and the report of each."""
    folder = tmp_path_factory.mktemp("outputs")
    made = {}
    for name, scheme in [("native", "ue5m3/16"), ("others", "nvfp4")]:
        report = mxquant.quantize_model(BUNDLED, folder / name, scheme)
        made[name] = (folder / name, report.to_dict())
    return made


@pytest.fixture
def report(outputs):
    return dict(outputs["others"][1])


def test_the_hub_finds_what_it_looks_for(outputs):
    for name, (folder, _) in outputs.items():
        head = matter((folder / "README.md").read_text())
        assert head["license"] == "apache-2.0"
        assert head["library_name"] == "transformers"
        assert head["pipeline_tag"] == "text-generation"
        assert {"mxquant", "4-bit", "fp4"} <= set(head["tags"])
        assert ("compressed-tensors" in head["tags"]) == (name == "others")
        assert "base_model" not in head  # a folder is no model of the hub


@pytest.mark.parametrize(
    ("auto", "use"),
    [("AutoModelForImageTextToText", "image-text-to-text"), ("AutoModelForMultimodalLM", "audio-text-to-text")],
)
def test_a_model_that_sees_or_hears_has_the_use_of_its_kind(report, auto, use):
    assert matter(model_card({**report, "auto_class": auto}))["pipeline_tag"] == use
    assert (
        matter(model_card({**report, "auto_class": auto}, source_card=SOURCE_CARD))["pipeline_tag"] == "text-generation"
    )


def test_what_holds_for_the_output_is_carried_from_the_source(report):
    head = matter(model_card(report, source_card=SOURCE_CARD, base_model="org/name"))
    assert (head["license"], head["license_name"]) == ("other", "my-terms")
    assert head["license_link"] == "https://example.org/terms"
    assert head["language"] == ["en", "de"]
    assert head["tags"][:2] == ["chat", "mxquant"]
    assert head["tags"].count("mxquant") == 1
    assert (head["base_model"], head["base_model_relation"]) == ("org/name", "quantized")
    assert "datasets" not in head


@pytest.mark.parametrize("card", ["", "# No front matter", "---\n: [broken\n---\n", "---\n- a list\n---\n", "---\n"])
def test_a_source_card_that_says_nothing_is_no_obstacle(card, report):
    head = matter(model_card(report, source_card=card))
    assert "license" not in head
    assert head["tags"][0] == "mxquant"


def test_the_base_model_is_known_where_a_hub_id_was_quantized(report):
    cache = "/home/me/.cache/huggingface/hub/models--org--some-name_2.5/snapshots/0123abcd"
    assert hub_id(cache) == "org/some-name_2.5"
    assert hub_id("/home/me/models/some-name") is None
    card = model_card({**report, "source": cache})
    assert matter(card)["base_model"] == "org/some-name_2.5"
    assert "(revision `0123abcd`)" in card
    assert "/home/me" not in card


def test_the_text_does_not_depend_on_where_the_output_lies(outputs, tmp_path):
    mxquant.quantize_model(BUNDLED, tmp_path / "elsewhere", "nvfp4")
    assert (tmp_path / "elsewhere/README.md").read_bytes() == (outputs["others"][0] / "README.md").read_bytes()


def test_figures_are_those_of_the_report(outputs):
    for folder, report in outputs.values():
        text = (folder / "README.md").read_text()
        assert f"{report['bytes_before'] / 1e6:.1f} MB" in text
        assert f"{report['bytes_before'] / report['bytes_after']:.2f} times smaller" in text
        assert f"{report['bits_per_weight']:.3f}, scales included" in text
        worst = report["worst_relative_error"]
        assert f"{report['mean_relative_error']:.4f} in the mean of the layers, at worst {worst['value']:.4f}" in text
        assert worst["layer"] in text
        for dense in report["dense"]:
            assert f"| {dense['reason']} | {dense['tensors']} | " in text
        assert "tied to `model.embed_tokens.weight`" in text
        for name, version in report["versions"].items():
            assert f"{name} {version}" in text


def test_a_mixture_of_schemes_is_listed_layer_by_layer(tmp_path):
    rules = {"q_proj|k_proj": "mxfp8", "down_proj": "ue5m3/32x32"}
    recipe = mxquant.QuantRecipe.from_dict({"rules": rules, "default": "ue5m3/16/stochastic", "activations": "mxfp8"})
    mxquant.quantize_model(BUNDLED, tmp_path / "q", recipe, seed=7)
    text = (tmp_path / "q/README.md").read_text()
    assert "| mxfp8 | fp8_e4m3 | e8m0 | 32 | even | k_proj, q_proj |" in text
    assert "| 32x32 | search | down_proj |" in text
    assert "| activations as it runs | mxfp8 |" in text
    assert "KV cache" not in text
    assert "seed 7" in text
    assert {"4-bit", "8-bit", "fp4", "fp8", "mxfp8"} <= set(matter(text)["tags"])


@pytest.mark.parametrize("name", ["native", "others"])
def test_the_example_in_the_card_loads_the_model(name, outputs, monkeypatch):
    folder, _ = outputs[name]
    (code,) = re.findall(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.DOTALL)
    monkeypatch.chdir(folder)
    made: dict = {}
    exec(code, made)
    assert type(made["model"]).__name__ == "LlamaForCausalLM"
    assert made["model"].config.quantization_config is not None
    assert made["tokenizer"].decode(made["tokenizer"]("import").input_ids, skip_special_tokens=True) == "import"


def test_the_card_of_the_source_is_kept_and_comes_back(outputs, tmp_path):
    folder, _ = outputs["native"]
    original = (BUNDLED / "README.md").read_bytes()
    assert (folder / "README.source.md").read_bytes() == original
    assert is_ours((folder / "README.md").read_text())
    mxquant.dequantize_model(folder, tmp_path / "dense")
    assert (tmp_path / "dense/README.md").read_bytes() == original
    assert not (tmp_path / "dense/README.source.md").exists()


def test_without_a_card_of_the_source_there_is_nothing_to_keep(make_checkpoint, tmp_path):
    mxquant.quantize_model(make_checkpoint("llama"), tmp_path / "q", "ue5m3/16")
    assert not (tmp_path / "q/README.source.md").exists()
    assert "README.source.md" not in (tmp_path / "q/README.md").read_text()
    mxquant.dequantize_model(tmp_path / "q", tmp_path / "d")
    assert not (tmp_path / "d/README.md").exists()


def test_writing_it_again_keeps_the_source_and_what_was_said_before(outputs, tmp_path):
    shutil.copytree(outputs["others"][0], tmp_path / "q")
    original = (tmp_path / "q/README.source.md").read_bytes()
    report = outputs["others"][1]
    write_card(tmp_path / "q", report, base_model="org/name")
    write_card(tmp_path / "q", report)
    assert (tmp_path / "q/README.source.md").read_bytes() == original
    assert matter((tmp_path / "q/README.md").read_text())["base_model"] == "org/name"
    restore_card(tmp_path / "q")
    restore_card(tmp_path / "q")  # a card that is not ours stays
    assert (tmp_path / "q/README.md").read_bytes() == original


def test_measured_quality_is_put_in(outputs, tmp_path):
    shutil.copytree(outputs["others"][0], tmp_path / "q")
    quick = ("--text", "builtin", "--seq-len", "64", "--windows", "5", "--device", "cpu")
    done = run("eval", tmp_path / "q", "--baseline", BUNDLED, *quick, "--output", tmp_path / "results.json", "--json")
    assert done.exit_code == 0, done.stderr
    assert run("card", tmp_path / "q", "--eval", tmp_path / "results.json").exit_code == 0
    text = (tmp_path / "q/README.md").read_text()
    dense, packed = json.loads((tmp_path / "results.json").read_text())["models"]
    assert f"| model (baseline) | {dense['perplexity']['perplexity']:.4g} | - | - | - |" in text
    found = packed["perplexity"]["divergence"]
    low, high = found["kl_interval"]
    assert f"| q | {packed['perplexity']['perplexity']:.4g} | {found['perplexity_ratio']:.4g} (" in text
    assert f"| {found['kl']:.4g} ({low:.4g} to {high:.4g}) | {found['top1_agreement']:.1%} |" in text
    assert "5 windows of 64 tokens of builtin" in text


def test_tasks_are_tables_and_other_models_are_refused(report):
    row = {"source": "/x/others", "name": "others", "is_baseline": False, "perplexity": None}
    row["tasks"] = {"piqa": {"acc": {"value": 0.5, "stderr": 0.01}, "f1|x": {"value": 0.25, "stderr": None}}}
    row["tasks"]["lambada"] = {"perplexity": {"value": None, "stderr": None}}
    base = {**row, "source": "org/name", "name": "dense", "is_baseline": True, "tasks": {}}
    text = model_card(report, evaluation={"models": [base, row]})
    assert "| task | metric | dense (baseline) | others |" in text
    assert "| piqa | acc | - | 0.5000 ± 0.0100 |" in text
    assert "| piqa | f1\\|x | - | 0.2500 |" in text
    assert "| lambada | perplexity | - | none |" in text
    with pytest.raises(CheckpointError, match="elsewhere"):
        model_card(report, evaluation={"models": [base, {**row, "source": "/x/elsewhere"}]})
    with pytest.raises(CheckpointError, match="no models"):
        model_card(report, evaluation={})


def test_several_texts_are_several_rows(report):
    def figures(value: float) -> dict:
        return {"perplexity": value, "windows": 3, "seq_len": 64, "divergence": None}

    texts = [{"name": f"/data/{name}.txt", "sha256": name * 64} for name in "ab"]
    row = {"source": "/x/others", "name": "others", "is_baseline": False, "perplexity": figures(7.5)}
    row["perplexities"] = {text["name"]: figures(value) for text, value in zip(texts, (7.5, 8.25), strict=True)}
    text = model_card(report, evaluation={"models": [row], "texts": texts, "text": texts[0]})
    assert "| others | a.txt | 7.5 | - | - | - |\n| others | b.txt | 8.25 | - | - | - |" in text
    assert f"of a.txt (sha256 `{'a' * 16}`); 3 windows of 64 tokens of b.txt (sha256 `{'b' * 16}`);" in text
    # Reports of one text, as they were.
    row = {key: value for key, value in row.items() if key != "perplexities"}
    text = model_card(report, evaluation={"models": [row], "text": texts[0]})
    assert "| others | 7.5 | - | - | - |" in text
    assert f"3 windows of 64 tokens of a.txt (sha256 `{'a' * 16}`); in brackets" in text


# Pushing, with the hub's client replaced.


class Hub:
    """Stands in for ``huggingface_hub.HfApi`` and remembers."""

    calls: list = []  # noqa: RUF012
    fails: str | None = None

    def _call(self, name, *args, **kwargs):
        self.calls.append((name, args, kwargs))
        if self.fails == name:
            raise ConnectionError(f"no route\nto {name}")

    def whoami(self):
        self._call("whoami")

    def create_repo(self, repo, **kwargs):
        from huggingface_hub import RepoUrl

        self._call("create_repo", repo, **kwargs)
        return RepoUrl(f"https://huggingface.co/{repo}")

    def upload_folder(self, **kwargs):
        self._call("upload_folder", **kwargs, files=sorted(p.name for p in kwargs["folder_path"].iterdir()))


@pytest.fixture
def hub(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(Hub, "calls", [])
    monkeypatch.setattr(Hub, "fails", None)
    return Hub


def test_quantize_pushes_the_whole_output_with_a_card_that_names_the_repository(hub, tmp_path):
    result = run("quantize", BUNDLED, "-o", tmp_path / "q", "--push-to-hub", "me/small", "--json")
    assert result.exit_code == 0, result.stderr
    assert [name for name, _, _ in hub.calls] == ["whoami", "create_repo", "upload_folder"]
    assert hub.calls[1][1:] == (("me/small",), {"private": True, "exist_ok": True})
    sent = hub.calls[2][2]
    assert (sent["repo_id"], sent["folder_path"]) == ("me/small", tmp_path / "q")
    assert {"README.md", "README.source.md", "config.json", "model.safetensors", "tokenizer.json"} <= set(sent["files"])
    text = (tmp_path / "q/README.md").read_text()
    assert 'path = "me/small"\n' in text
    assert "\n# small\n" in text
    assert "Pushed to https://huggingface.co/me/small" in result.stderr
    json.loads(result.stdout)


def test_card_pushes_too(hub, outputs, tmp_path):
    shutil.copytree(outputs["others"][0], tmp_path / "q")
    result = run("card", tmp_path / "q", "--base-model", "org/name", "--push-to-hub", "me/small")
    assert result.exit_code == 0, result.stderr
    assert hub.calls[-1][2]["repo_id"] == "me/small"
    assert matter((tmp_path / "q/README.md").read_text())["base_model"] == "org/name"


@pytest.mark.parametrize(
    ("repo", "fails", "message"),
    [("a/b/c", None, "not a name"), ("me/small", "whoami", "no route to whoami")],
)
def test_what_cannot_be_pushed_is_known_before_the_work(repo, fails, message, hub, tmp_path):
    hub.fails = fails
    result = run("quantize", BUNDLED, "-o", tmp_path / "q", "--push-to-hub", repo)
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "q").exists()


def test_offline_it_says_so(monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(MXQuantError, match="HF_HUB_OFFLINE"):
        upload.check_can_push("me/small")


def test_an_upload_that_fails_leaves_the_output_whole(hub, tmp_path):
    hub.fails = "upload_folder"
    result = run("quantize", BUNDLED, "-o", tmp_path / "q", "--push-to-hub", "me/small", "--json")
    assert result.exit_code == 1
    assert "the local copy is complete" in result.stderr
    assert run("verify", tmp_path / "q").exit_code == 0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("./nowhere",), "quantization_report.json"),
        ((BUNDLED,), "no output of mxquant quantize"),
        (("OUT", "--eval", "./nowhere.json"), "nowhere.json"),
        (("OUT", "--eval", "OUT/README.md"), "not the JSON of mxquant eval"),
    ],
)
def test_a_wrong_request_gives_one_line(args, message, outputs):
    out = str(outputs["others"][0])
    result = run("card", *(str(a).replace("OUT", out) for a in args))
    assert result.exit_code == 1
    assert message in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_preset_with_another_rule_keeps_its_tag(tmp_path):
    mxquant.quantize_model(BUNDLED, tmp_path / "q", "nvfp4/absmax")
    assert "nvfp4" in matter((tmp_path / "q/README.md").read_text())["tags"]
