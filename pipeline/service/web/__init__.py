"""Web pages: rendered on the server, readable without JavaScript, without resources of other sites."""
