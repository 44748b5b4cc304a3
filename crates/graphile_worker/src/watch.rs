//! What changes on the disk while a worker runs: its folder of tasks and its crontab. Both are read again and again, and
//! what has changed is put in place of what was.
//!
//! By looking and not by being told: that also works on volumes of other machines. What is a task is decided in
//! `tasks_dir`; what the worker does with others than before, in `hand` and `exchange`, and in `cron`.

use crate::Error;
use crate::cron_items;
use crate::task::Tasks;
use crate::tasks_dir::{Loaded, Scan, TasksDir};
use graphile_worker_crontab::{Crontab, parse_crontab};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{Mutex, watch};
use tracing::{info, warn};

/// How often to look. Where looking takes long (a large folder, a slow volume), most of the time is left for other things.
const LOOK_INTERVAL: Duration = Duration::from_millis(300);
const REST_FOR_WORK: u32 = 10;

/// Where the crontab is.
#[derive(Debug, Clone)]
pub(crate) struct CrontabFile {
    pub(crate) path: PathBuf,
    pub(crate) may_be_missing: bool,
}

/// What a file says; none where there is no file, and why where it cannot be read.
type Text = Result<Option<String>, String>;

fn read(path: &Path) -> Text {
    match std::fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error.to_string()),
    }
}

/// A crontab in a file, beside the items that are defined in code.
pub(crate) struct WatchedCrontab {
    file: CrontabFile,
    in_code: Vec<Crontab>,
    text: Text,
}

impl WatchedCrontab {
    pub(crate) fn read(file: CrontabFile, in_code: Vec<Crontab>) -> Result<WatchedCrontab, Error> {
        // The program may go to another folder later.
        let path =
            std::path::absolute(&file.path).map_err(|error| file.problem(format!("cannot be found: {error}")))?;
        let text = read(&path);
        Ok(WatchedCrontab { file: CrontabFile { path, ..file }, in_code, text })
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
        cron_items::checked(self.in_code.iter().cloned().chain(parsed).collect())
    }
}

impl CrontabFile {
    fn problem(&self, problem: String) -> Error {
        Error::CrontabFile { path: self.path.clone(), problem }
    }
}

/// What is looked at, and what was last seen.
pub(crate) struct Watched {
    folder: Option<Folder>,
    crontab: Option<WatchedCrontab>,
    /// What the crontab said a moment ago, if it is not what it said before.
    next_text: Option<Text>,
    /// Items of the crontab whose task was not known when something last changed.
    of_unknown_tasks: Vec<Arc<Crontab>>,
    tasks: watch::Sender<Arc<Tasks>>,
    crontabs: watch::Sender<Vec<Arc<Crontab>>>,
}

struct Folder {
    dir: Arc<TasksDir>,
    loaded: Loaded,
    /// What the folder held a moment ago, if it is not what it held before.
    next: Option<Scan>,
}

impl Watched {
    pub(crate) fn new(
        folder: Option<(TasksDir, Loaded)>,
        crontab: Option<WatchedCrontab>,
        tasks: &watch::Sender<Arc<Tasks>>,
        crontabs: &watch::Sender<Vec<Arc<Crontab>>>,
    ) -> Watched {
        Watched {
            folder: folder.map(|(dir, loaded)| Folder { dir: Arc::new(dir), loaded, next: None }),
            crontab,
            next_text: None,
            of_unknown_tasks: cron_items::of_unknown_tasks(&crontabs.borrow(), &tasks.borrow()),
            tasks: tasks.clone(),
            crontabs: crontabs.clone(),
        }
    }

    /// Looks again and again.
    async fn keep_looking(&mut self) {
        loop {
            let began = Instant::now();
            self.look().await;
            tokio::time::sleep(LOOK_INTERVAL.max(began.elapsed() * REST_FOR_WORK)).await;
        }
    }

    async fn look(&mut self) {
        let dir = self.folder.as_ref().map(|folder| folder.dir.clone());
        let crontab = self.crontab.as_ref().map(|crontab| crontab.file.path.clone());
        let look = move || (dir.map(|dir| dir.scan()), crontab.map(|path| read(&path)));
        // It cannot fail but with the runtime.
        let Ok((scan, text)) = tokio::task::spawn_blocking(look).await else { return };
        let mut may_be_unknown = false;
        if let (Some(folder), Some(scan)) = (&mut self.folder, scan) {
            let scan = scan.unwrap_or_else(|error| Scan::of_nothing(folder.dir.path(), &error));
            if folder.see(scan).await {
                let before = self.tasks.send_replace(Arc::new(folder.loaded.tasks.clone()));
                may_be_unknown |= !have_the_same_names(&before, &folder.loaded.tasks);
            }
        }
        if let Some(text) = text {
            may_be_unknown |= self.see_crontab(text);
        }
        if may_be_unknown {
            self.tell_of_unknown_tasks();
        }
    }

    /// Takes what the crontab says now. Says whether there are other items than before.
    fn see_crontab(&mut self, text: Text) -> bool {
        let Some(crontab) = &mut self.crontab else { return false };
        if !is_settled(&crontab.text, &mut self.next_text, &text) {
            return false;
        }
        crontab.text = text;
        let path = crontab.file.path.display();
        match crontab.items() {
            Ok(items) => {
                info!(label = "cron", %path, items = items.len(), "the crontab has changed");
                self.crontabs.send_replace(items);
                true
            }
            Err(error) => {
                let error = error.to_string();
                warn!(label = "cron", %path, error, "the crontab has changed and cannot be used: going on with what it was");
                false
            }
        }
    }

    /// Says again which items have no task here: what was said when the worker began is far up in the log, or true no more.
    fn tell_of_unknown_tasks(&mut self) {
        let (items, tasks) = (self.crontabs.borrow().clone(), self.tasks.borrow().clone());
        let names = |item: &Crontab| (item.identifier().to_owned(), item.task_identifier.clone());
        let was_unknown = |item: &Crontab| self.of_unknown_tasks.iter().any(|old| names(old) == names(item));
        for item in items.iter().filter(|item| was_unknown(item) && tasks.contains_key(&*item.task_identifier)) {
            let (task_identifier, item) = (&item.task_identifier, item.identifier());
            info!(label = "cron", task_identifier, item, "this worker knows the task of a crontab item now");
        }
        self.of_unknown_tasks = cron_items::of_unknown_tasks(&items, &tasks);
        cron_items::warn_of_unknown_tasks(&self.of_unknown_tasks);
    }
}

fn have_the_same_names(before: &Tasks, now: &Tasks) -> bool {
    before.len() == now.len() && before.keys().all(|name| now.contains_key(name))
}

impl Folder {
    /// Takes what the folder holds now. Says whether there are other tasks than before.
    async fn see(&mut self, scan: Scan) -> bool {
        if !is_settled(&self.loaded.scan, &mut self.next, &scan) {
            return false;
        }
        let loaded = self.dir.load(scan, Some(&self.loaded)).await;
        let before = std::mem::replace(&mut self.loaded, loaded);
        let tell = |identifier: &str, what: &str| {
            info!(label = "worker", task_identifier = identifier, change = what, "a task has changed");
        };
        let mut changes = 0;
        for (identifier, task) in &self.loaded.tasks {
            match before.tasks.get(identifier) {
                None => tell(identifier, "added"),
                Some(old) if !Arc::ptr_eq(old, task) => tell(identifier, "changed"),
                Some(_) => continue,
            }
            changes += 1;
        }
        for identifier in before.tasks.keys().filter(|identifier| !self.loaded.tasks.contains_key(*identifier)) {
            tell(identifier, "removed");
            changes += 1;
        }
        changes > 0
    }
}

/// Whether something is different, and was the same different thing when last looked at: what is just being written is
/// not taken by half.
fn is_settled<T: Clone + PartialEq>(before: &T, next: &mut Option<T>, now: &T) -> bool {
    if now == before {
        *next = None;
        return false;
    }
    if next.as_ref() == Some(now) {
        *next = None;
        return true;
    }
    *next = Some(now.clone());
    false
}

/// Looks until it is dropped.
pub(crate) struct Looking(tokio::task::JoinHandle<()>);

impl Looking {
    pub(crate) fn start(watched: Arc<Mutex<Watched>>) -> Looking {
        Looking(tokio::spawn(async move { watched.lock().await.keep_looking().await }))
    }
}

impl Drop for Looking {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_being_written_is_not_taken_by_half() {
        let mut next = None;
        let seen: Vec<bool> =
            ["a", "ab", "abc", "abc", "abc"].iter().map(|now| is_settled(&"a", &mut next, now)).collect();
        assert_eq!(seen, [false, false, false, true, false]);
    }
}
