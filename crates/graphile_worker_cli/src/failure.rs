//! How a command ends that did not do its work: one message on standard error, and an exit code.

use crate::log;
use std::error::Error;
use std::fmt::Write;

/// Why the program ends without having done its work.
#[derive(Debug)]
pub(crate) enum Failure {
    /// Asked for something it cannot do: 2.
    Usage(String),
    /// Tried and failed: 1.
    Failed(Box<dyn Error + Send + Sync>),
    /// Failed, and everything is said already: 1.
    Said,
    /// A newer release takes over the schema: 57.
    SchemaMovesOn(String),
    /// Ended at once by a signal of this number: 128 and that, as a shell would say.
    Signal(u8),
}

impl Failure {
    /// Failed, for a reason that is a sentence.
    pub(crate) fn because(reason: impl Into<String>) -> Failure {
        Failure::Failed(reason.into().into())
    }

    /// Says why, and how that looks to a script.
    pub(crate) fn tell(self) -> i32 {
        match self {
            Failure::Usage(message) => {
                log::last_words(&format!("{message} (see --help)"));
                2
            }
            Failure::Failed(error) => {
                log::last_words(&explain(error.as_ref()));
                1
            }
            Failure::Said => 1,
            Failure::SchemaMovesOn(reason) => {
                log::last_words(&reason);
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

/// An error with its sources. Of what the server said, its message, detail and hint.
pub(crate) fn explain(error: &(dyn Error + 'static)) -> String {
    if let Some(sqlx::Error::Database(database)) = error.downcast_ref::<sqlx::Error>() {
        let error = database.downcast_ref::<sqlx::postgres::PgDatabaseError>();
        let parts = [Some(error.message()), error.detail(), error.hint()];
        return parts.into_iter().flatten().map(|part| part.replace('\n', " ")).collect::<Vec<_>>().join(": ");
    }
    let mut message = error.to_string();
    // Some errors already print what they wrap.
    if let Some(source) = error.source()
        && !message.ends_with(&source.to_string())
    {
        let _ = write!(message, ": {}", explain(source));
    }
    message
}
