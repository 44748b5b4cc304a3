//! Which jobs a worker runs, by their flags: the setting (`FlagSettings`), and what a claim asks for (`FlagFilter`).

use crate::Error;
use futures_util::FutureExt;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;

type FlagsFunction = dyn Fn() -> Pin<Box<dyn Future<Output = Option<Vec<String>>> + Send>> + Send + Sync;

/// Which jobs the worker runs, by their flags.
#[derive(Clone, Default)]
pub(crate) struct FlagSettings {
    pub(crate) forbidden: Flags,
    pub(crate) accepted: Flags,
    /// The allowlist: all flags that a job may have, if there is one.
    pub(crate) allowed: Option<Vec<String>>,
}

impl FlagSettings {
    /// Whether no function decides.
    pub(crate) fn are_listed(&self) -> bool {
        [&self.forbidden, &self.accepted].iter().all(|flags| matches!(flags, Flags::List(_)))
    }

    /// The flags for the next claim.
    pub(crate) async fn current(&self) -> Result<FlagFilter, Error> {
        Ok(FlagFilter {
            forbidden: self.forbidden.current().await.map_err(|_| Error::ForbiddenFlagsPanicked)?,
            accepted: self.accepted.current().await.map_err(|_| Error::AcceptedFlagsPanicked)?,
            allowed: self.allowed.as_deref().map(FlagFilter::object),
        })
    }

    /// Rejects flags that no job can match.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let Flags::List(accepted) = &self.accepted else { return Ok(()) };
        let no_job = |reason: &str| {
            let problem = format!("{accepted:?} match no job: {reason}");
            Err(Error::InvalidOption { setting: "accepted_flags", problem })
        };
        if accepted.is_empty() {
            return Ok(());
        }
        if let Some(allowed) = &self.allowed
            && !accepted.iter().any(|flag| allowed.contains(flag))
        {
            return no_job(&format!("none of them is in job_flag_allowlist {allowed:?}"));
        }
        if let Flags::List(forbidden) = &self.forbidden
            && accepted.iter().all(|flag| forbidden.contains(flag))
        {
            return no_job("all of them are in forbidden_flags");
        }
        Ok(())
    }
}

/// A list of flags, or a function that returns them.
#[derive(Clone)]
pub(crate) enum Flags {
    List(Vec<String>),
    Function(Arc<FlagsFunction>),
}

impl Default for Flags {
    fn default() -> Flags {
        Flags::List(Vec::new())
    }
}

impl Flags {
    pub(crate) fn function<F, Fut>(flags: F) -> Flags
    where
        F: Fn() -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Option<Vec<String>>> + Send + 'static,
    {
        Flags::Function(Arc::new(move || Box::pin(flags())))
    }

    /// Adds to a list; replaces a function.
    pub(crate) fn add(&mut self, flag: &str) {
        match self {
            Flags::List(flags) => flags.push(flag.to_owned()),
            Flags::Function(_) => *self = Flags::List(vec![flag.to_owned()]),
        }
    }

    /// The listed flags; `None` if a function decides.
    pub(crate) fn listed(&self) -> Option<Vec<String>> {
        match self {
            Flags::List(flags) => Some(flags.clone()),
            Flags::Function(_) => None,
        }
    }

    /// The flags, or `None` if there are none. An error if the function panics.
    async fn current(&self) -> std::thread::Result<Option<Vec<String>>> {
        let flags = match self {
            Flags::List(flags) => Some(flags.clone()),
            Flags::Function(function) => AssertUnwindSafe(async { function().await }).catch_unwind().await?,
        };
        Ok(flags.filter(|flags| !flags.is_empty()))
    }
}

/// Which jobs a worker may run, by their flags; `None` if all may run.
#[derive(Default)]
pub(crate) struct FlagFilter {
    pub(crate) forbidden: Option<Vec<String>>,
    pub(crate) accepted: Option<Vec<String>>,
    /// In the format of the `flags` column: an object with the value true for each flag.
    pub(crate) allowed: Option<serde_json::Value>,
}

impl FlagFilter {
    pub(crate) fn object(flags: &[String]) -> serde_json::Value {
        flags.iter().map(|flag| (flag.clone(), true.into())).collect::<serde_json::Map<_, _>>().into()
    }
}
