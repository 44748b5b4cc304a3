//! How a command fails: one message on standard error, and an exit code. `log` formats the message.

use crate::log;
use std::error::Error;
use std::fmt::Write;

/// Why a command failed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Usage error: exit code 2.
    Usage(String),
    /// Any other error: exit code 1.
    Failed(Box<dyn Error + Send + Sync>),
    /// The error is already printed: exit code 1.
    AlreadyReported,
    /// A newer release takes over the schema: exit code 57.
    NewerRelease(String),
    /// Interrupted by the signal with this number: exit code 128 plus the number, as in a shell.
    Signal(u8),
}

impl Failure {
    /// A failure with this message.
    pub(crate) fn because(reason: impl Into<String>) -> Failure {
        Failure::Failed(reason.into().into())
    }

    /// Prints the message and returns the exit code.
    pub(crate) fn report(self) -> i32 {
        match self {
            Failure::Usage(message) => {
                log::print_failure(&format!("{message} (see --help)"));
                2
            }
            Failure::Failed(error) => {
                log::print_failure(&explain(error.as_ref()));
                1
            }
            Failure::AlreadyReported => 1,
            Failure::NewerRelease(reason) => {
                log::print_failure(&reason);
                57
            }
            Failure::Signal(number) => 128 + i32::from(number),
        }
    }
}

impl<E: Into<Box<dyn Error + Send + Sync>>> From<E> for Failure {
    fn from(error: E) -> Failure {
        Failure::Failed(error.into())
    }
}

/// The error with its sources. For an error of the server: its message, detail and hint.
pub(crate) fn explain(error: &(dyn Error + 'static)) -> String {
    if let Some(sqlx::Error::Database(database)) = error.downcast_ref::<sqlx::Error>() {
        let error = database.downcast_ref::<sqlx::postgres::PgDatabaseError>();
        let parts = [Some(error.message()), error.detail(), error.hint()];
        return parts.into_iter().flatten().map(|part| part.replace('\n', " ")).collect::<Vec<_>>().join(": ");
    }
    let mut message = error.to_string();
    // Some errors already include their source.
    if let Some(source) = error.source()
        && !message.ends_with(&source.to_string())
    {
        let _ = write!(message, ": {}", explain(source));
    }
    message
}
