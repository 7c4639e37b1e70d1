"""Who is who, and who may do what: certificates, roles, who sees pages."""
