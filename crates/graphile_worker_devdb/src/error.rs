//! The errors of this crate, with advice.

use std::path::PathBuf;

/// Errors of private PostgreSQL servers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// PostgreSQL is not installed.
    #[error(
        "PostgreSQL is not installed (searched for initdb, pg_ctl and postgres in PATH, \
         pg_config --bindir, /usr/lib/postgresql/*/bin, Homebrew and Postgres.app): install it with \
         `apt-get install postgresql` (Debian, Ubuntu), `dnf install postgresql-server` (Fedora) or \
         `brew install postgresql@17` (macOS), or set PGBIN to the folder of its programs"
    )]
    NotInstalled,

    /// PgBouncer is not installed.
    #[error(
        "PgBouncer is not installed (searched for pgbouncer in PATH, /usr/sbin and Homebrew): install it with \
         `apt-get install pgbouncer` (Debian, Ubuntu), `dnf install pgbouncer` (Fedora) or `brew install pgbouncer` (macOS)"
    )]
    NoPgBouncer,

    /// `PGBIN` does not contain the programs.
    #[error("PGBIN is {}, but it does not contain {missing}: set it to the folder with initdb, pg_ctl and postgres, or unset it", folder.display())]
    WrongPgbin {
        /// The value of `PGBIN`.
        folder: PathBuf,
        /// The first missing program.
        missing: &'static str,
    },

    /// The folder was created by another PostgreSQL version.
    #[error("{} was created by PostgreSQL {folder_version}, but {} is version {programs_version}: set PGBIN to the programs of version {folder_version}, or delete the folder", folder.display(), programs.display())]
    VersionMismatch {
        /// The folder of the cluster.
        folder: PathBuf,
        /// The version that created it.
        folder_version: String,
        /// The folder of the programs.
        programs: PathBuf,
        /// The version of the programs.
        programs_version: String,
    },

    /// The process runs as root, and the user that PostgreSQL would run as may not enter the folder.
    #[error("PostgreSQL cannot run as root and would run as `{user}`, who may not enter {}: choose another folder, or do not run as root", blocked.display())]
    Unreachable {
        /// The user that PostgreSQL would run as.
        user: String,
        /// The folder that this user may not enter.
        blocked: PathBuf,
    },

    /// The folder belongs to another user.
    #[error("{} belongs to another user: delete it, or choose another folder", folder.display())]
    ForeignFolder {
        /// The folder of the cluster.
        folder: PathBuf,
    },

    /// One of PostgreSQL's programs failed.
    #[error("{program} failed: {output}")]
    Program {
        /// Its name.
        program: &'static str,
        /// The last lines of its output.
        output: String,
    },

    /// An I/O error.
    #[error("could not {context}")]
    Io {
        /// What failed, as in "start postgres".
        context: String,
        /// The error.
        source: std::io::Error,
    },

    /// A database error.
    #[error("could not {context}")]
    Database {
        /// What failed, as in "copy a running server".
        context: String,
        /// The error.
        source: sqlx::Error,
    },

    /// Installing a template failed.
    #[error("could not install the template database `{template}`")]
    Template {
        /// The name that was passed to [`Cluster::database`](crate::Cluster::database).
        template: String,
        /// The error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Adds to an error what failed.
pub(crate) trait Context<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T> Context<T> for std::io::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Io { context: what(), source })
    }
}

impl<T> Context<T> for sqlx::Result<T> {
    fn context(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Database { context: what(), source })
    }
}
