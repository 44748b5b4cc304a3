//! A crontab in a file: read when the worker starts, and read again while it runs if it is watched.
//!
//! The file is polled, because file notifications do not work on all mounted volumes.

use super::items;
use crate::Error;
use crate::task::Tasks;
use crate::task_source::{FILE_POLL_INTERVAL, is_stable};
use graphile_worker_crontab::{Crontab, parse_crontab};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tokio::sync::watch;
use tracing::{info, warn};

/// Where the crontab is.
#[derive(Debug, Clone)]
pub(crate) struct CrontabFile {
    pub(crate) path: PathBuf,
    pub(crate) may_be_missing: bool,
}

/// The text of a file, `None` if there is no file, or why it cannot be read.
type Text = Result<Option<String>, String>;

fn read(path: &Path) -> Text {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// A crontab in a file, and the items that are defined in code.
pub(crate) struct WatchedCrontab {
    file: CrontabFile,
    in_code: Vec<Crontab>,
    text: Text,
    /// The text of the last poll, if it differs.
    next: Option<Text>,
}

impl WatchedCrontab {
    pub(crate) fn read(file: CrontabFile, in_code: Vec<Crontab>) -> Result<WatchedCrontab, Error> {
        // The program may change its working directory later.
        let path =
            std::path::absolute(&file.path).map_err(|error| file.problem(format!("cannot be found: {error}")))?;
        let text = read(&path);
        Ok(WatchedCrontab { file: CrontabFile { path, ..file }, in_code, text, next: None })
    }

    /// All items, those in code included.
    pub(crate) fn items(&self) -> Result<Vec<Arc<Crontab>>, Error> {
        let text = match &self.text {
            Ok(Some(text)) => text,
            Ok(None) if self.file.may_be_missing => "",
            Ok(None) => return Err(self.file.problem("does not exist".to_owned())),
            Err(error) => return Err(self.file.problem(format!("cannot be read: {error}"))),
        };
        let parsed =
            parse_crontab(text).map_err(|source| Error::InvalidCrontabFile { path: self.file.path.clone(), source })?;
        items::checked(self.in_code.iter().cloned().chain(parsed).collect())
    }

    /// Sends the new items whenever the file has changed.
    pub(crate) async fn watch(&mut self, crontabs: &watch::Sender<Vec<Arc<Crontab>>>) {
        loop {
            tokio::time::sleep(FILE_POLL_INTERVAL).await;
            let path = self.file.path.clone();
            let Ok(text) = tokio::task::spawn_blocking(move || read(&path)).await else { return };
            if !is_stable(&self.text, &mut self.next, &text) {
                continue;
            }
            self.text = text;
            let path = self.file.path.display();
            match self.items() {
                Ok(items) => {
                    info!(label = "cron", %path, items = items.len(), "crontab reloaded");
                    crontabs.send_replace(items);
                }
                Err(error) => {
                    let error = error.to_string();
                    warn!(label = "cron", %path, error, "the changed crontab is invalid; keeping the previous one");
                }
            }
        }
    }
}

impl CrontabFile {
    fn problem(&self, problem: String) -> Error {
        Error::CrontabFile { path: self.path.clone(), problem }
    }
}

/// Logs which items have no task here, whenever tasks or items have changed, and which have one again.
pub(crate) async fn log_unknown_tasks(
    mut tasks: watch::Receiver<Arc<Tasks>>,
    mut crontabs: watch::Receiver<Vec<Arc<Crontab>>>,
) {
    let mut unknown = items::of_unknown_tasks(&crontabs.borrow_and_update(), &tasks.borrow_and_update());
    let mut names = names_of(&tasks.borrow());
    loop {
        let items_changed = tokio::select! {
            Ok(()) = tasks.changed() => false,
            Ok(()) = crontabs.changed() => true,
            else => return,
        };
        let (current, items) = (tasks.borrow_and_update().clone(), crontabs.borrow_and_update().clone());
        let current_names = names_of(&current);
        if !items_changed && current_names == names {
            continue;
        }
        names = current_names;
        let key = |item: &Crontab| (item.identifier().to_owned(), item.task_identifier.clone());
        let was_unknown = |item: &Crontab| unknown.iter().any(|old| key(old) == key(item));
        for item in items.iter().filter(|item| was_unknown(item) && current.contains_key(&*item.task_identifier)) {
            let (task_identifier, item) = (&item.task_identifier, item.identifier());
            info!(label = "cron", task_identifier, item, "this worker now defines the task of a crontab item");
        }
        unknown = items::of_unknown_tasks(&items, &current);
        items::warn_of_unknown_tasks(&unknown);
    }
}

fn names_of(tasks: &Tasks) -> std::collections::BTreeSet<Arc<str>> {
    tasks.keys().cloned().collect()
}
