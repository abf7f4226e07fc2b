"""Who makes a request, by token, session or trusted proxy, and what each role may do."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any

from fastapi import Depends, Request, Security
from fastapi.security import HTTPBearer
from starlette.exceptions import HTTPException

from pipeline.service.http.app_state import Service
from pipeline.service.http.users.sessions import COOKIE
from pipeline.service.http.users.tokens import User
from pipeline.service.store import NoSuchJob, StoredJob

LOCAL_USER = User("local", "operator", by="loopback")

# For the description only: the web pages have a session's cookie, a trusted proxy its header.
_BEARER = HTTPBearer(
    bearerFormat="a token that `millrace token create` made", auto_error=False, scheme_name="token",
    description="Required if the service has a tokens_file.",
)  # fmt: skip


async def user_of(request: Request, _: Annotated[object, Security(_BEARER)] = None) -> User:
    """Who makes a request; 401 if that is not known. Does not block."""
    request.state.user = user = await _known_user(request)
    return user


async def _known_user(request: Request) -> User:
    service: Service = request.app.state.service
    proxied = service.proxies.user(request)
    if proxied is not None:
        return proxied
    known = service.tokens()
    if known is None and service.settings.proxy_user_header is None:
        return LOCAL_USER
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    token = token.strip() if scheme.lower() == "bearer" else ""
    found = known.user(token) if known is not None and token else None
    if not token and known is not None and (cookie := request.cookies.get(COOKIE)):
        token, began_with = cookie, service.sessions.token_of(cookie)
        held = known.with_digest(began_with) if began_with is not None else None
        found = None if held is None else replace(held.user, by="session")
    if found is None:
        fault = "the token is not known here, or has expired" if token else "send a token (Authorization: Bearer TOKEN)"
        raise HTTPException(401, fault, {"WWW-Authenticate": 'Bearer realm="millrace"'})
    return found


CurrentUser = Annotated[User, Depends(user_of)]


async def submitter_of(user: CurrentUser) -> User:
    """Who makes a request that changes something; 403 for viewers."""
    if user.role == "viewer":
        raise HTTPException(403, f"{user.name} is a viewer and may only look; ask an operator for the role user")
    return user


async def operator_of(user: CurrentUser) -> User:
    """Who makes a request that only operators may make; 403 for others."""
    if not user.is_operator:
        raise HTTPException(403, f"{user.name} is not an operator; ask one")
    return user


Submitter = Annotated[User, Depends(submitter_of)]
Operator = Annotated[User, Depends(operator_of)]


class Auditor:
    """Notes what the user of a request does."""

    def __init__(self, request: Request) -> None:
        self._request = request

    def __call__(self, what: str, **facts: Any) -> None:
        service: Service = self._request.app.state.service
        if service.audit is not None:
            service.audit.note(what, **_whose(self._request), **facts)


async def auditor_of(request: Request) -> Auditor:
    """Notes what the user of this request does."""
    return Auditor(request)


Audit = Annotated[Auditor, Depends(auditor_of)]


def note_refusal(request: Request, status: int, detail: str) -> None:
    """Notes a request that was refused for who made it: one that came with a wrong token, or asks for too much."""
    service: Service = request.app.state.service
    is_anonymous = "authorization" not in request.headers and request.url.path != "/login"
    if service.audit is None or status not in (401, 403) or (status == 401 and is_anonymous):
        return
    what = "sign-in refused" if status == 401 else "refused"
    service.audit.note_refusal(
        what, **_whose(request), request=f"{request.method} {request.url.path[:200]}", why=detail
    )


def _whose(request: Request) -> dict[str, Any]:
    user: User | None = getattr(request.state, "user", None)
    peer, client = getattr(request.state, "peer", ""), request.client.host if request.client is not None else ""
    return {
        "who": user.name if user is not None else None, "by": user.by if user is not None else None, "source": client,
        "through": peer if peer != client else None,
    }  # fmt: skip


async def is_let_in(request: Request, stored: StoredJob | None) -> bool:
    """Whether who made a request is still known, and may see that job: a stream may outlive it."""
    try:
        user = await user_of(request)
    except HTTPException:
        return False
    return stored is None or user.sees(stored.asked.group)


def visible_job(service: Service, user: User, job: str) -> StoredJob:
    """A job as this user sees it. Raises NoSuchJob also for jobs of other groups."""
    stored = service.store.job(job)
    if not user.sees(stored.asked.group):
        raise NoSuchJob(f"there is no job {job}")
    return stored


def own_job(service: Service, user: User, job: str) -> StoredJob:
    """A job that this user may change; raises as `visible_job`, and 403 for another user's unless an operator asks."""
    stored = visible_job(service, user, job)
    if stored.asked.owner != user.name and not user.is_operator:
        raise HTTPException(403, f"job {stored.job.id} is {stored.asked.owner}'s, and you are {user.name}")
    return stored
