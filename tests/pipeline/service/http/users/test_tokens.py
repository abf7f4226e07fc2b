"""The file of tokens and its commands: what a line allows, when it ends, and that no token is in it."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime

import pytest

from pipeline.errors import ParameterError
from pipeline.service.http.users import tokens as tokens_module
from pipeline.service.http.users.tokens import Tokens, User, digest_of, expiry, token_line

DIGEST = "0" * 64


@pytest.fixture
def file(tmp_path):
    return tmp_path / "tokens"


@pytest.mark.parametrize(
    ("more", "user"),
    [
        ("", User("ada", "user", ("",))),
        ("role=viewer", User("ada", "viewer", ("",))),
        ("group=mri", User("ada", "user", ("mri",))),
        ("group=mri,eeg,mri role=operator", User("ada", "operator", ("mri", "eeg"))),
        ("expires=2999-01-01 role=user", User("ada", "user", ("",))),
        ("expires=2999-01-01T12:00:00+01:00", User("ada", "user", ("",))),
        ("expires=1999-01-01", None),
    ],
)
def test_what_a_line_allows(file, more, user):
    file.write_text(f"ada sha256:{digest_of('t')} {more}\n")
    assert Tokens(file).user("t") == user
    assert Tokens(file).user("T") is None
    found = Tokens(file).with_digest(digest_of("t"))
    assert (found and found.user) == user


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("role=king", "is not NAME sha256:HEX"),
        ("group=", "is not NAME"),
        ("group=a,,b", "is not NAME"),
        ("group=a/b", "is not NAME"),
        ("role=user role=operator", "the same key twice"),
        ("expires=90d", "expires '90d': write an age such as 90d, or a date such as 2027-01-31"),
        ("expires=2026-02-30", "write an age"),
        ("wizard=yes", "is not NAME"),
    ],
)
def test_a_wrong_line_is_named(file, more, said):
    file.write_text(f"# ours\nada sha256:{DIGEST} {more}\n")
    with pytest.raises(ParameterError, match="line 2: ") as caught:
        Tokens(file)
    assert said in str(caught.value)


def test_a_line_says_what_it_was_made_of(file):
    at = datetime(2999, 1, 31, 12, tzinfo=UTC).timestamp()
    line = token_line("ada", "t", "viewer", ["mri", "eeg"], at)
    assert line == f"ada sha256:{digest_of('t')} role=viewer group=mri,eeg expires=2999-01-31T12:00:00Z"
    file.write_text(line)
    (token,) = Tokens(file)
    assert (token.line(), token.expires_at, token.id) == (line, at, digest_of("t")[:8])
    with pytest.raises(ParameterError, match="'a b': a group has up to 64 letters"):
        token_line("ada", "t", groups=["a b"])


@pytest.mark.parametrize(
    ("text", "seconds"), [("12h", 43_200), ("90d", 7_776_000), ("4w", 2_419_200), ("1970-01-02", 86_400 - 1000.0)]
)
def test_expiries_are_ages_or_dates(text, seconds):
    assert expiry(text, 1000.0) == 1000.0 + seconds


@pytest.mark.parametrize("text", ["", "d", "0d", "-1d", "90", "1y", "2027-13-01", "tomorrow", "123456d"])
def test_what_is_no_expiry_is_refused(text):
    with pytest.raises(ParameterError, match="write an age such as 90d"):
        expiry(text, 0.0)


def test_a_token_ends_while_the_service_runs(file, monkeypatch):
    file.write_text(token_line("ada", "t", expires_at=time.time() + 60))
    tokens = Tokens(file)
    assert tokens.user("t") == User("ada")
    now = time.time()
    monkeypatch.setattr(tokens_module.time, "time", lambda: now + 61)
    assert tokens.user("t") is None
    assert tokens.with_digest(digest_of("t")) is None


class TestCommands:
    @pytest.fixture(autouse=True)
    def _environment(self, monkeypatch, file):
        monkeypatch.setenv("MILLRACE_TOKENS_FILE", str(file))

    def created(self, millrace, *arguments):
        code, line, said = millrace("token", *arguments)
        assert code == 0, said
        return line, said.rpartition(": ")[2].strip()

    def test_a_line_and_the_token_come_out_apart(self, millrace, file):
        for arguments in (("ada",), ("create", "ada"), ("--role", "user", "ada")):
            line, token = self.created(millrace, *arguments)
            assert line == f"ada sha256:{digest_of(token)}\n"
            assert not file.exists()

    def test_created_listed_and_revoked_in_a_file(self, millrace, file):
        file.write_text("# ours")  # without the end of its line
        file.chmod(0o640)
        made = {}
        for name, *more in (
            ("ada", "--group", "mri", "--expires", "2999-01-31"),
            ("bob", "--role", "viewer"),
            ("ada",),
        ):
            line, token = self.created(millrace, "create", name, "--file", str(file), *more)
            assert line == ""
            made[token] = name
        assert all(Tokens(file).user(token).name == name for token, name in made.items())
        assert not any(token in file.read_text() for token in made)
        code, out, _ = millrace("token", "list", "--json")
        views = json.loads(out)
        assert (code, [(each["name"], each["role"], each["groups"]) for each in views]) == (
            0, [("ada", "user", ["mri"]), ("bob", "viewer", []), ("ada", "user", [])],
        )  # fmt: skip
        assert views[0]["expires_at"] == datetime(2999, 1, 31, tzinfo=UTC).timestamp()
        _, out, _ = millrace("token", "list")
        assert out.splitlines()[1] == f"{views[1]['id']}  bob  viewer  –"
        assert "ada  user  mri  expires 2999-01-31" in out

        code, out, _ = millrace("token", "revoke", views[1]["id"])
        assert (code, out) == (0, f"revoked {views[1]['id']} of bob\n")
        code, out, _ = millrace("token", "revoke", "ada")
        assert (code, len(out.splitlines())) == (0, 2)
        assert file.read_text() == "# ours\n"
        assert file.stat().st_mode & 0o777 == 0o640
        assert [each.name for each in file.parent.iterdir()] == ["tokens"]
        code, _, said = millrace("token", "revoke", "ada")
        assert code == 2
        assert said == f"millrace: tokens_file {file}: has no token of ada; `millrace token list` shows those it has\n"

    def test_mistakes_are_one_line(self, millrace, file, tmp_path):
        for arguments, said in (
            (("list",), "No such file or directory"),
            (("create", "a b"), "a name has up to 64 letters"),
            (("create", "ada", "--expires", "soon"), "write an age such as 90d"),
            (("create", "ada", "--expires", "1999-12-31"), "expires '1999-12-31': is past; choose a later date"),
            (("create", "ada", "--file", str(tmp_path)), "Is a directory; leave out --file, and add the line yourself"),
            (("create", "ada", "--role", "king"), "'king' is not one of 'viewer', 'user', 'operator'"),
        ):
            code, out, error = millrace("token", *arguments)
            assert (code, out, len(error.splitlines())) == (2, "", 1)
            assert said in error

    def test_an_expired_token_is_listed_as_that(self, millrace, file):
        file.write_text(f"ada sha256:{DIGEST} expires=1999-12-31\n")
        _, out, _ = millrace("token", "list")
        assert "expired 1999-12-31" in out
