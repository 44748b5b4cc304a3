//! What the tests of scripts share: a project with a folder of tasks, and queries about its jobs and processes.

use crate::support::{Db, until};
use graphile_worker::WorkerOptions;
use graphile_worker_scripts::TasksDir;
use serde_json::Value;
use std::path::PathBuf;
use std::time::Duration;

/// A project with a folder of tasks, deleted after the test. Tasks write notes into files of the project's folder.
pub(crate) struct Project(pub(crate) PathBuf);

impl Project {
    pub(crate) fn new() -> Project {
        static NUMBER: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
        let number = NUMBER.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("graphile_worker_hosts_{}_{number}", std::process::id()));
        std::fs::create_dir_all(path.join("tasks")).unwrap();
        Project(path)
    }

    pub(crate) fn tasks(&self) -> PathBuf {
        self.0.join("tasks")
    }

    /// A task; in it, `OUT` is the project's folder, and `note(file, value)` adds a line of JSON to a file there.
    pub(crate) fn task(&self, name: &str, body: &str) -> &Project {
        let out = self.0.display();
        let text = match name.rsplit('.').next().unwrap() {
            "py" => format!(
                "import json, os, sys, time\nOUT = '{out}'\ndef note(file, value):\n  with open(OUT + '/' + file, 'a') as f: f.write(json.dumps(value, default=str) + '\\n')\n{body}\n"
            ),
            "mjs" => format!(
                "import fs from 'node:fs';\nconst OUT = '{out}';\nconst note = (file, value) => fs.appendFileSync(OUT + '/' + file, JSON.stringify(value) + '\\n');\n{body}\n"
            ),
            _ => format!(
                "const OUT = '{out}';\nconst note = (file, value) => require('fs').appendFileSync(OUT + '/' + file, JSON.stringify(value) + '\\n');\n{body}\n"
            ),
        };
        self.file(&format!("tasks/{name}"), &text)
    }

    pub(crate) fn file(&self, name: &str, text: &str) -> &Project {
        let path = self.0.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
        self
    }

    /// Creates a virtual environment for Python, without packages.
    pub(crate) fn virtual_environment(&self) -> PathBuf {
        let folder = self.0.join(".venv");
        let mut make = std::process::Command::new("python3");
        let made = make.args(["-m", "venv", "--without-pip"]).arg(&folder).status().unwrap();
        assert!(made.success());
        folder
    }

    /// The notes in a file so far. A task may be in the middle of writing the last line, so only whole lines count.
    pub(crate) fn notes(&self, file: &str) -> Vec<Value> {
        let text = std::fs::read_to_string(self.0.join(file)).unwrap_or_default();
        let lines = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
        lines.map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits until a file has at least this many notes.
    pub(crate) async fn noted(&self, file: &str, count: usize) -> Vec<Value> {
        let what = format!("{file} has {count} lines");
        until(&what, async || Some(self.notes(file)).filter(|notes| notes.len() >= count)).await
    }
}

impl Drop for Project {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

pub(crate) fn options(db: &Db, project: &Project) -> WorkerOptions {
    WorkerOptions::default()
        .pg_pool(db.pool.clone())
        .listen_os_shutdown_signals(false)
        .concurrency(8)
        .poll_interval(Duration::from_secs(3600))
        .task_source(TasksDir::new(project.tasks()))
}

pub(crate) async fn run_once(db: &Db, project: &Project) {
    options(db, project).init().await.unwrap().run_once().await.unwrap();
}

pub(crate) async fn jobs(db: &Db) -> Vec<Value> {
    db.rows("select task_identifier, attempts, last_error, queue_name, priority, max_attempts, key from graphile_worker.jobs order by id").await
}

pub(crate) async fn last_error(db: &Db) -> String {
    db.value("select last_error from graphile_worker.jobs").await.as_str().unwrap().to_owned()
}

/// Waits until this many jobs have failed, and returns their errors.
pub(crate) async fn failed(db: &Db, count: usize) -> Vec<String> {
    let what = format!("{count} jobs have failed");
    let sql = "select last_error from graphile_worker.jobs where last_error is not null order by id";
    until(&what, async || {
        let rows = db.rows(sql).await;
        (rows.len() >= count).then(|| rows.iter().map(|row| row["last_error"].as_str().unwrap().to_owned()).collect())
    })
    .await
}

/// Whether the process runs. A zombie, which its parent has not waited for yet, does not.
pub(crate) fn is_alive(pid: impl std::fmt::Display) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit(')').next().is_some_and(|rest| !rest.is_empty() && !rest.trim_start().starts_with(['Z', 'X']))
}

/// Waits until the process has ended.
pub(crate) async fn gone(pid: &Value) {
    until("the process has ended", async || (!is_alive(pid)).then_some(())).await;
}
