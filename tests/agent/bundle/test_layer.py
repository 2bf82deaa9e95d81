from __future__ import annotations

from agent.bundle.layer import MAX_NAME_CHARS, MAX_NODES, Layer, clean, shorten


def test_a_layer_comes_back_from_its_attributes() -> None:
    layer = Layer.of([("Conv", "/stem/conv"), ("Relu", "r")], "3x3 /2 g4", [(1, 3, 8, 8)], [(1, 4, 4, 4), ()])
    assert Layer.from_attrs(layer.to_attrs()) == layer
    assert layer.names == ("/stem/conv", "r")
    assert layer.operators == ("Conv", "Relu")
    assert layer.to_attrs()["writes"] == "1x4x4x4,scalar"
    assert Layer.of([]).to_attrs() == {}
    assert Layer.from_attrs({"func_name": "f"}) == Layer()


def test_names_from_a_model_are_bounded_printable_ascii() -> None:
    hostile = "a,b\x1b[31m\n" + "\N{GREEK SMALL LETTER ALPHA}" + "x" * 100_000
    layer = Layer.of([("Conv", hostile)] * 1000, hostile, [(1,)] * 1000, [(10**30,) * 1000])
    text = "".join(layer.to_attrs().values())
    assert text.isascii()
    assert text.isprintable()
    assert len(layer.nodes) == len(layer.reads) == MAX_NODES
    assert all(len(name) <= MAX_NAME_CHARS for name in layer.names)
    assert len(text) < 5000
    assert Layer.from_attrs(layer.to_attrs()) == layer


def test_attributes_from_a_bundle_are_bounded_too() -> None:
    layer = Layer.from_attrs(
        {"onnx": "Conv \x1b]0;x\x07," * 10_000, "window": "\n" * 10_000, "reads": "é," * 99}
    )
    assert len(layer.nodes) <= MAX_NODES
    assert all(node.isascii() and node.isprintable() for node in (*layer.nodes, layer.window, *layer.reads))
    assert len(layer.window) <= 64


def test_a_long_text_loses_its_middle() -> None:
    assert shorten("abcdefghij", 6) == "ab..ij"
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abc", 1) == ".."
    assert clean("a b,c", 9, " ") == "a b_c"
