"""Who may speak: identities, memberships, invitations, signed records, and access control."""
