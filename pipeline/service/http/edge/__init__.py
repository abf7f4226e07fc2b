"""What each request passes before a route answers it: TLS, bounds on connections, access checks, recent answers."""
