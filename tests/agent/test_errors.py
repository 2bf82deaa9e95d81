from __future__ import annotations

from agent import errors


def leaves(cls: type[errors.EdgeError]) -> list[type[errors.EdgeError]]:
    below = cls.__subclasses__()
    return [leaf for child in below for leaf in leaves(child)] or [cls]


def test_wire_codes_never_change() -> None:
    codes = {cls.__name__: cls.code for cls in leaves(errors.BundleError)}
    assert codes == {
        "SignatureError": "ERR_ARBITRARY_SOFTWARE",
        "FormatError": "ERR_ARBITRARY_SOFTWARE",
        "MixAndMatchError": "ERR_MIX_AND_MATCH",
        "EndlessDataError": "ERR_ENDLESS_DATA",
        "RollbackError": "ERR_ROLLBACK",
        "IncompatibleError": "ERR_INCOMPATIBLE",
        "KeyRevokedError": "ERR_KEY_REVOKED",
        "SelfTestError": "ERR_SELF_TEST",
    }
    assert errors.NoSpaceError.code == "ERR_NO_SPACE"


def test_statuses_never_change() -> None:
    statuses = {cls.__name__: cls.status for cls in leaves(errors.RequestError)}
    assert statuses == {
        "InputError": 400,
        "UnknownModelError": 404,
        "DeadlineError": 408,
        "MediaTypeError": 415,
        "ExecutionError": 500,
        "OverloadedError": 503,
    }


def test_docstring_draws_the_whole_tree() -> None:
    names = {cls.__name__ for cls in vars(errors).values() if isinstance(cls, type)}
    assert all(name in (errors.__doc__ or "") for name in names)


def test_hint_stands_beside_the_message() -> None:
    error = errors.ConfigError("expected a port, not x", hint="set mqtt.port")
    assert (str(error), error.hint) == ("expected a port, not x", "set mqtt.port")
    assert errors.SourceError("gone").hint is None
