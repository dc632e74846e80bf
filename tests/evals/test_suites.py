from __future__ import annotations

import json

import pytest

from evals.suites import load, parse, problems
from registry.errors import InvalidInput


def test_a_valid_suite_has_no_problems(spec):
    assert problems(spec()) == []
    suite = parse(spec())
    assert suite.name == "sums"
    assert suite.make_grader().name == "numeric/1"
    assert suite.decoding.temperature == 0


def test_a_prompt_is_the_template_with_the_question(spec):
    suite = parse(spec(template="<Q>{question}</Q> {not a field}"))
    item = suite.items[0].model_copy(update={"question": "what is {x} {question}?"})
    assert suite.render(item) == "<Q>what is {x} {question}?</Q> {not a field}"


@pytest.mark.parametrize(
    ("changes", "telling"),
    [
        ({"format": 2}, "format"),
        ({"name": "Sums of two"}, "name: use lower-case letters"),
        ({"template": "no placeholder"}, "{question} must stand in it exactly once, not 0 times"),
        ({"template": "{question}{question}"}, "not 2 times"),
        ({"decoding": {"max_tokens": 0}}, "decoding.max_tokens"),
        ({"decoding": {"max_tokens": "16"}}, "decoding.max_tokens"),
        ({"decoding": {"max_tokens": 16, "temperature": 0.7}}, "only 0 (greedy)"),
        ({"decoding": {"max_tokens": 16, "stop": [""]}}, "end every answer at once"),
        ({"decoding": {"max_tokens": 16, "top_p": 1}}, "decoding.top_p is not a field"),
        ({"grader": {"kind": "judge"}}, "'judge' is unknown; use exact or numeric"),
        ({"grader": {}}, "grader.kind is missing"),
        ({"grader": []}, "grader"),
        ({"items": []}, "items"),
        ({"items": "all"}, "items"),
        ({"items": ["one"]}, "items[0]"),
        ({"extra": 1}, "extra is not a field of a suite"),
    ],
)
def test_a_mistake_is_named(spec, changes, telling):
    found = problems(spec(**changes))
    assert any(telling in line for line in found), found


@pytest.mark.parametrize(
    ("place", "changes", "telling"),
    [
        (3, {"id": "sums-1"}, "items[3].id repeats that of items[1]: 'sums-1'"),
        (3, {"question": "What is  11 + 1? "}, "items[3].question repeats that of items[1]"),
        (2, {"answer": ""}, "items[2].answer"),
        (2, {"answer": "  "}, "items[2].answer is blank"),
        (2, {"question": " "}, "items[2].question is blank"),
        (2, {"answer": "fourteen"}, "items[2].answer: 'fourteen' is not one number"),
        (2, {"answer": 14}, "items[2].answer"),
        (2, {"id": ""}, "items[2].id"),
        (2, {"hint": "x"}, "items[2].hint is not a field"),
    ],
)
def test_a_mistake_in_an_item_is_named_with_its_place(spec, place, changes, telling):
    value = spec()
    value["items"][place] |= changes
    found = problems(value)
    assert any(line.startswith(telling) for line in found), found


def test_all_mistakes_are_told_at_once(spec):
    value = spec(template="", grader={"kind": "judge"})
    value["items"][4]["id"] = "sums-0"
    del value["decoding"]
    with pytest.raises(InvalidInput) as caught:
        parse(value)
    message = caught.value.message
    assert message.startswith("suite 'sums' cannot be used:\n- ")
    for telling in ("decoding is missing", "{question}", "'judge'", "items[4].id repeats"):
        assert telling in message


def test_a_long_list_of_mistakes_is_cut(spec):
    value = spec(60)
    for item in value["items"]:
        item["answer"] = "none"
    with pytest.raises(InvalidInput, match="and 40 more"):
        parse(value)


@pytest.mark.parametrize("value", [None, [], "suite", 3])
def test_no_object_is_no_suite(value):
    with pytest.raises(InvalidInput, match="a suite is a JSON object"):
        parse(value)


def test_an_empty_object_lacks_everything():
    assert [line for line in problems({}) if line.endswith("is missing")] == [
        "format is missing",
        "name is missing",
        "template is missing",
        "decoding is missing",
        "grader is missing",
        "items is missing",
    ]


def test_load_reads_a_file(spec, tmp_path):
    path = tmp_path / "suite.json"
    path.write_text(json.dumps(spec()))
    assert load(path) == parse(spec())


@pytest.mark.parametrize(
    ("data", "telling"),
    [
        (b'{"format": 1,\n "name": }', "suite.json is not JSON: .* at line 2, column 10"),
        (b"\xff\xfe", "suite.json is not UTF-8"),
        (b"", "suite.json is not JSON"),
        (None, "there is no file .*suite.json"),
    ],
)
def test_load_explains_a_bad_file(tmp_path, data, telling):
    path = tmp_path / "suite.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(InvalidInput, match=telling):
        load(path)
