"""Who the users are: their tokens, the sessions of browsers, and what trusted proxies say."""
