"""Who makes a request: sessions of browsers, and users that a trusted proxy names; other peers name nobody."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from pipeline.errors import ParameterError
from pipeline.service.http.users import sessions as sessions_module
from pipeline.service.http.users.sessions import Sessions
from pipeline.service.http.users.tokens import Tokens, TokensFile, digest_of, new_token, revoke, token_line
from pipeline.service.settings import load_service_settings
from pipeline.service.store import SESSIONS_OF_A_TOKEN
from tests.pipeline.service.calls import JOB, assert_problem

PROXY = {
    "trusted_proxies": "10.1.0.0/16, 192.0.2.7, fd00::/8", "proxy_user_header": "X-Forwarded-User",
    "proxy_groups_header": "X-Forwarded-Groups", "proxy_operator_group": "admins", "proxy_viewer_group": "guests",
}  # fmt: skip


class TestSessions:
    @pytest.fixture
    def file(self, tmp_path):
        (tmp_path / "tokens").write_text(f"{token_line('ada', 'a')}\n{token_line('bob', 'b')}\n")
        return tmp_path / "tokens"

    def signed_in(self, client, token="a"):
        assert client.post("/login", json={"token": token}).status_code == 204
        return client.cookies["millrace_session"]

    def test_the_cookie_is_neither_the_token_nor_stored(self, world, file, tmp_path):
        client = world.http(Tokens(file))
        cookie = self.signed_in(client)
        assert cookie != "a"
        assert len(cookie) >= 43
        assert client.get("/v1/jobs").status_code == 200
        state = b"".join(each.read_bytes() for each in (tmp_path / "state").iterdir())
        assert cookie.encode() not in state
        assert digest_of(cookie).encode() in state
        client.cookies.clear()
        assert client.get("/v1/jobs").status_code == 401
        assert client.get("/v1/jobs", headers={"Authorization": f"Bearer {cookie}"}).status_code == 401
        for forged in ("a", digest_of("a"), digest_of(cookie), ""):
            assert client.get("/v1/jobs", headers={"Cookie": f"millrace_session={forged}"}).status_code == 401

    def test_signing_out_ends_the_session_on_the_server(self, world, file):
        client = world.http(Tokens(file))
        cookie = self.signed_in(client)
        client.post("/logout", follow_redirects=False)
        client.cookies.set("millrace_session", cookie)
        assert client.get("/v1/jobs").status_code == 401

    def test_sessions_survive_restarts_and_end_with_their_token(self, world, file):
        tokens = TokensFile(file)
        client = world.http(tokens.now())
        cookies = {token: self.signed_in(client, token) for token in "ab"}
        held = Sessions(world.store)  # of a server started later
        assert {held.token_of(cookie) for cookie in cookies.values()} == {digest_of("a"), digest_of("b")}
        revoke(file, "ada")
        client = world.http(tokens.now())
        for token, status in (("a", 401), ("b", 200)):
            assert (
                client.get("/v1/jobs", headers={"Cookie": f"millrace_session={cookies[token]}"}).status_code == status
            )

    def test_sessions_end_with_time_and_not_after_their_token(self, world, file, monkeypatch):
        now = time.time()
        file.write_text(f"{token_line('ada', 'a')}\n{token_line('bob', 'b', expires_at=now + 3600)}\n")
        client = world.http(Tokens(file))
        ages = {token: client.post("/login", json={"token": token}).headers["set-cookie"] for token in "ab"}
        assert f"Max-Age={30 * 86_400}" in ages["a"]
        assert 3590 <= int(ages["b"].partition("Max-Age=")[2].partition(";")[0]) <= 3600
        cookie = self.signed_in(client)
        monkeypatch.setattr(sessions_module.time, "time", lambda: now + 31 * 86_400)
        assert client.get("/v1/jobs", headers={"Cookie": f"millrace_session={cookie}"}).status_code == 401
        self.signed_in(client)
        assert len(world.store.sessions(now=0.0)) == 1, "expired ones are forgotten"

    def test_one_token_has_only_so_many(self, world, file):
        sessions, (token, other) = Sessions(world.store), Tokens(file)
        kept, _ = sessions.begin(other)
        cookies = [sessions.begin(token)[0] for _ in range(SESSIONS_OF_A_TOKEN + 3)]
        alive = [cookie for cookie in cookies if sessions.token_of(cookie) is not None]
        assert alive == cookies[3:]
        assert sessions.token_of(kept) == other.digest

    def test_many_may_sign_in_at_once(self, world, file):
        sessions, (token, _) = Sessions(world.store), Tokens(file)
        with ThreadPoolExecutor(8) as threads:
            cookies = [secret for secret, _ in threads.map(lambda _: sessions.begin(token), range(64))]
        assert {sessions.token_of(cookie) for cookie in cookies} == {token.digest}

    def test_the_cookie_is_secure_under_tls(self, world, file):
        for base_url, headers, is_secure in (
            ("https://127.0.0.1", {}, True),
            ("http://127.0.0.1", {}, False),
            ("http://127.0.0.1", {"X-Forwarded-Proto": "https"}, True),  # a proxy on this machine
        ):
            client = world.http(Tokens(file), base_url=base_url)
            cookie = client.post("/login", json={"token": "a"}, headers=headers).headers["set-cookie"]
            assert ("Secure" in cookie, "HttpOnly" in cookie, "SameSite=strict" in cookie) == (is_secure, True, True)
        stranger = world.http(Tokens(file), peer="198.51.100.9")
        answer = stranger.post("/login", json={"token": "a"}, headers={"X-Forwarded-Proto": "https"})
        assert "Secure" not in answer.headers["set-cookie"]


class TestProxies:
    def named(self, client, user="ada@example.org", groups=None):
        return {"X-Forwarded-User": user} | ({} if groups is None else {"X-Forwarded-Groups": groups})

    def submitted(self, client, headers):
        return client.post("/v1/jobs", json=JOB, headers=headers)

    @pytest.mark.parametrize("peer", ["10.1.200.3", "192.0.2.7", "fd00::1", "::ffff:192.0.2.7"])
    def test_a_trusted_peer_names_the_user(self, world, peer):
        client = world.http(peer=peer, **PROXY)
        job = self.submitted(client, self.named(client, groups="/mri, eeg,with space,mri")).json()["jobs"][0]
        assert (job["owner"], job["group"]) == ("ada@example.org", "mri")
        assert client.get(f"/v1/jobs/{job['id']}", headers=self.named(client, "bob", "eeg")).status_code == 404
        assert client.get(f"/v1/jobs/{job['id']}", headers=self.named(client, "bob", "mri")).status_code == 200
        page = client.get("/", headers=self.named(client, groups="mri")).text
        assert "ada@example.org" in page
        assert "/logout" not in page, "the proxy signs out"

    @pytest.mark.parametrize("peer", ["10.2.0.1", "127.0.0.1", "::1", "fe80::1", "testclient", ""])
    def test_the_header_of_anybody_else_is_nothing(self, world, tmp_path, peer):
        (tmp_path / "tokens").write_text(token_line("bob", "b"))
        for tokens in (None, Tokens(tmp_path / "tokens")):
            client = world.http(tokens, peer=peer, **PROXY)
            assert_problem(self.submitted(client, self.named(client, groups="admins")), 401, "send a token")
            spoofed = self.named(client) | {"X-Forwarded-For": "192.0.2.7"}
            assert self.submitted(client, spoofed).status_code == 401
        both = self.named(client, groups="admins") | {"Authorization": "Bearer b"}
        assert self.submitted(client, both).json()["jobs"][0]["owner"] == "bob"

    def test_it_is_off_by_default(self, world, tmp_path):
        token = new_token()
        (tmp_path / "tokens").write_text(token_line("bob", token))
        client = world.http(Tokens(tmp_path / "tokens"), trusted_proxies="127.0.0.1")
        assert self.submitted(client, self.named(client)).status_code == 401
        headers = self.named(client) | {"Authorization": f"Bearer {token}"}
        assert self.submitted(client, headers).json()["jobs"][0]["owner"] == "bob"

    def test_groups_give_roles(self, world):
        client = world.http(peer="192.0.2.7", **PROXY)
        assert self.submitted(client, self.named(client, groups="guests,mri")).status_code == 403
        raised = client.post("/v1/jobs", json=JOB | {"priority": 1}, headers=self.named(client, groups="admins"))
        assert raised.status_code == 201
        plain = client.post("/v1/jobs", json=JOB | {"priority": 1}, headers=self.named(client, groups="mri"))
        assert_problem(plain, 403, "only operators")

    @pytest.mark.parametrize("user", ["a b", "ada\t", "", "x" * 65, "../root"])
    def test_a_name_that_no_user_may_have_lets_nobody_in(self, world, user):
        client = world.http(peer="192.0.2.7", **PROXY)
        assert_problem(self.submitted(client, {"X-Forwarded-User": user}), 401, "x-forwarded-user: ")

    def test_a_header_that_came_twice_is_refused(self, world):
        client = world.http(peer="192.0.2.7", **PROXY)
        for name in ("X-Forwarded-User", "X-Forwarded-Groups"):
            headers = [("X-Forwarded-User", "ada"), ("X-Forwarded-Groups", "mri"), (name, "admins")]
            assert_problem(client.get("/v1/jobs", headers=headers), 400, "came 2 times")

    def test_tokens_work_beside_the_proxy(self, world, tmp_path):
        (tmp_path / "tokens").write_text(token_line("bob", "b"))
        client = world.http(Tokens(tmp_path / "tokens"), peer="192.0.2.7", **PROXY)
        answer = self.submitted(client, {"Authorization": "Bearer b"})
        assert answer.json()["jobs"][0]["owner"] == "bob"

    def test_a_page_is_not_sent_to_a_sign_in_that_does_not_exist(self, world):
        client = world.http(peer="198.51.100.9", **PROXY)
        assert client.get("/", follow_redirects=False).status_code == 401

    @pytest.mark.parametrize(
        ("flags", "said"),
        [
            ({"proxy_user_header": "X-User"}, "proxy_user_header: set trusted_proxies too"),
            ({"trusted_proxies": "10.0.0.1/8"}, "--trusted-proxies: '10.0.0.1/8' is neither an address nor a network"),
            ({"proxy_user_header": "X User"}, "--proxy-user-header: 'X User' is not the name of an HTTP header"),
            ({"host": "0.0.0.0", "trusted_proxies": "10.0.0.1"}, "is open to others: set a tokens_file"),
        ],
    )
    def test_settings_that_would_let_everybody_in_are_refused(self, flags, said):
        with pytest.raises(ParameterError) as caught:
            load_service_settings({"data_roots": "/d"} | flags)
        assert said in str(caught.value)

    def test_a_proxy_may_be_all_that_lets_people_in(self):
        flags = {"data_roots": "/d", "host": "0.0.0.0", "trusted_proxies": "10.0.0.1", "proxy_user_header": "X-User"}
        in_force = load_service_settings(flags)
        assert not in_force.settings.is_open_to_all
        assert any(line.split()[:2] == ["trusted_proxies", "10.0.0.1"] for line in in_force.lines())
