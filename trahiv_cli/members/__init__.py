"""Access control: identities, memberships, invitations, signed records."""
