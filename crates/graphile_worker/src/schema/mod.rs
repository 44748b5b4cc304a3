//! The schema in the database: installing, migrating, upgrading while older workers run, granting rights, and
//! uninstalling.

pub(crate) mod migrate;
pub(crate) mod roles;
pub(crate) mod steps;
pub(crate) mod uninstall;
pub(crate) mod upgrade;
