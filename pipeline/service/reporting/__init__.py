"""Reports to others what happens: the audit log for operators, webhooks for other services, states for systemd."""
