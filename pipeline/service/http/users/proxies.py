"""What reverse proxies say of a request: its client and scheme, and with `proxy_user_header` its user. Only peers that
the settings name are believed."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import ip_address, ip_network

from fastapi import Request
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import Scope

from pipeline.errors import printable
from pipeline.service.http.users.tokens import NO_GROUP, Role, User, is_name
from pipeline.service.settings import ServiceSettings

_LOOPBACK = ("127.0.0.0/8", "::1/128")


class Proxies:
    """The trusted proxies of a service; on loopback the client and the scheme are believed, but no user."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._named = tuple(map(ip_network, settings.trusted_proxies))
        self._all = (*self._named, *map(ip_network, _LOOPBACK))
        self._is_in = lru_cache(maxsize=1024)(self._is_in_uncached)

    def received(self, scope: Scope) -> Scope:
        """The request with its client and scheme as the proxies saw them; `peer` in its state is who sent it here."""
        peer = (scope.get("client") or ("", 0))[0]
        found = {**scope, "state": {**scope.get("state", {}), "peer": peer}}
        if not self._is_in(peer, False):
            return found
        headers = Headers(scope=scope)
        # The last address that no trusted proxy added; those before it are the client's own words.
        passed = [each.strip() for line in headers.getlist("x-forwarded-for") for each in line.split(",")]
        client = next((each for each in reversed(passed) if not self._is_in(each, False)), None)
        if client:
            found["client"] = (client, 0)
        scheme = headers.get("x-forwarded-proto", "").strip().lower()
        if scheme in ("http", "https"):
            found["scheme"] = scheme
        return found

    def user(self, request: Request) -> User | None:
        """The user that a trusted proxy names. HTTPException if it names none that can be one."""
        header = self._settings.proxy_user_header
        if header is None or not self._is_in(getattr(request.state, "peer", ""), True):
            return None
        name = _only(request, header)
        if name is None:
            return None
        if not is_name(name):
            raise HTTPException(401, f"{header}: {printable(name[:64])!r} is no name that a user may have here")
        passed = _only(request, self._settings.proxy_groups_header) or ""
        # Keycloak begins names of groups with a slash.
        groups = [group for each in passed.split(",") if is_name(group := each.strip().removeprefix("/"))]
        role: Role = "user"
        if self._settings.proxy_viewer_group in groups:
            role = "viewer"
        if self._settings.proxy_operator_group in groups:
            role = "operator"
        return User(name, role, tuple(dict.fromkeys(groups)) or (NO_GROUP,), by="proxy")

    def _is_in_uncached(self, text: str, only_named: bool) -> bool:
        try:
            address = ip_address(text)
        except ValueError:
            return False
        address = getattr(address, "ipv4_mapped", None) or address
        return any(address in network for network in (self._named if only_named else self._all))


def _only(request: Request, header: str | None) -> str | None:
    found = request.headers.getlist(header) if header is not None else []
    if len(found) > 1:  # a proxy that adds its own leaves the client's in place
        raise HTTPException(400, f"{header}: came {len(found)} times; the proxy must replace what clients send")
    return found[0] if found else None
