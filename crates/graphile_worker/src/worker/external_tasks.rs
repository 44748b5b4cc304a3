//! The tasks of a source beside those in code: merged into the worker's tasks, and again whenever the source has changed.

use crate::task::{RepeatableTasks, TaskOptions, Tasks};
use crate::task_source::OpenTaskSource;
use std::collections::HashMap;
use std::sync::Arc;
use tokio::sync::watch;

/// A source that the worker has opened.
#[derive(Clone)]
pub(crate) struct ExternalTasks {
    pub(super) source: Arc<dyn OpenTaskSource>,
    in_code: Tasks,
    options: HashMap<String, TaskOptions>,
    repeatable: RepeatableTasks,
}

impl ExternalTasks {
    pub(super) fn new(
        source: Arc<dyn OpenTaskSource>,
        in_code: Tasks,
        options: HashMap<String, TaskOptions>,
        repeatable: RepeatableTasks,
    ) -> ExternalTasks {
        ExternalTasks { source, in_code, options, repeatable }
    }

    /// The tasks in code, and those of the source that have other names.
    pub(super) fn all_tasks(&self) -> Tasks {
        let mut tasks = self.in_code.clone();
        for definition in self.source.tasks() {
            let mut task = definition.0;
            if let Some(options) = self.options.get(&*task.identifier) {
                task.options = options.clone();
            }
            self.repeatable.mark(&mut task);
            tasks.entry(task.identifier.clone()).or_insert_with(|| Arc::new(task));
        }
        tasks
    }

    /// Sends the tasks whenever the source has changed.
    pub(super) async fn watch(&self, tasks: &watch::Sender<Arc<Tasks>>) {
        loop {
            self.source.changed().await;
            tasks.send_replace(Arc::new(self.all_tasks()));
        }
    }
}
