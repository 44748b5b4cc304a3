//! What can go wrong, each with what to do about it.

use std::path::PathBuf;

/// Why a private PostgreSQL could not be found, started or used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// No installation was found in any of the usual places.
    #[error(
        "PostgreSQL is not installed here (looked for initdb, pg_ctl and postgres in PATH, \
         pg_config --bindir, /usr/lib/postgresql/*/bin, Homebrew and Postgres.app): install it with \
         `apt-get install postgresql` (Debian, Ubuntu), `dnf install postgresql-server` (Fedora) or \
         `brew install postgresql@17` (macOS), or set PGBIN to the folder of its programs"
    )]
    NotInstalled,

    /// `PGBIN` names a folder without the programs.
    #[error("PGBIN is {}, but there is no {missing} in it: set it to the folder that holds initdb, pg_ctl and postgres, or unset it", folder.display())]
    WrongPgbin {
        /// The value of `PGBIN`.
        folder: PathBuf,
        /// The first program that is not there.
        missing: &'static str,
    },

    /// The folder was made by a PostgreSQL whose programs are not the ones found.
    #[error("{} was made by PostgreSQL {folder_version}, but {} is version {programs_version}: set PGBIN to the programs of version {folder_version}, or remove the folder to start anew", folder.display(), programs.display())]
    VersionMismatch {
        /// The folder of the cluster.
        folder: PathBuf,
        /// The version that made it.
        folder_version: String,
        /// The folder of the programs.
        programs: PathBuf,
        /// The version of the programs.
        programs_version: String,
    },

    /// Started as root, PostgreSQL runs as another user, who must be able to reach the folder.
    #[error("PostgreSQL refuses to run as root and would run as `{user}`, who may not enter {}: choose a folder elsewhere, or run as an ordinary user", blocked.display())]
    Unreachable {
        /// The user that PostgreSQL would run as.
        user: String,
        /// The folder that this user may not enter.
        blocked: PathBuf,
    },

    /// The folder is there but belongs to somebody else.
    #[error("{} belongs to another user: remove it, or choose another folder", folder.display())]
    ForeignFolder {
        /// The folder of the cluster.
        folder: PathBuf,
    },

    /// One of PostgreSQL's programs failed.
    #[error("{program} failed: {output}")]
    Program {
        /// Its name.
        program: &'static str,
        /// The last lines it wrote.
        output: String,
    },

    /// A file or a process could not be handled.
    #[error("could not {doing}")]
    Io {
        /// What was tried.
        doing: String,
        /// Why it failed.
        source: std::io::Error,
    },

    /// The server refused a statement.
    #[error("could not {doing}")]
    Database {
        /// What was tried.
        doing: String,
        /// Why it failed.
        source: sqlx::Error,
    },

    /// The function that installs a template failed.
    #[error("could not install the template database `{template}`")]
    Template {
        /// The name that was given to [`Cluster::database`](crate::Cluster::database).
        template: String,
        /// Why it failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
}

/// Turns an I/O error into ours, saying what was being done.
pub(crate) trait Doing<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error>;
}

impl<T> Doing<T> for std::io::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Io { doing: what(), source })
    }
}

impl<T> Doing<T> for sqlx::Result<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, Error> {
        self.map_err(|source| Error::Database { doing: what(), source })
    }
}
