"""Identity and permission: certificates, roles, access to pages."""
