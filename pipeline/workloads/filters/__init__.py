"""The filters that come with Millrace, as operators: `millrace run median IN OUT`."""
