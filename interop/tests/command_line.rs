//! A folder of executables with a crontab, under Node's command line and under ours: the same effect.

#![allow(missing_docs)]

use chrono::{Duration as Span, Timelike, Utc};
use graphile_worker_interop::{CommandLine, Db, patiently};
use serde_json::Value;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Writes down everything that it was given.
const TELL: &str = r#"#!/bin/sh
body=$(cat)
printf '%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n' "$GRAPHILE_WORKER_TASK_IDENTIFIER" "$GRAPHILE_WORKER_PAYLOAD_FORMAT" \
  "$GRAPHILE_WORKER_JOB_KEY" "$GRAPHILE_WORKER_JOB_ATTEMPTS" "$GRAPHILE_WORKER_JOB_MAX_ATTEMPTS" \
  "$GRAPHILE_WORKER_JOB_PRIORITY" "$GRAPHILE_WORKER_JOB_RUN_AT" "$body" >> "$EFFECTS"
"#;

struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, crontab: &str) -> Folder {
        let folder = std::env::temp_dir().join(format!("gw-interop-{}-{name}", std::process::id()));
        std::fs::create_dir_all(folder.join("tasks/nested/deep")).expect("a folder");
        for (file, text) in [
            ("tasks/tell", TELL),
            ("tasks/nested/deep/tell.sh", TELL),
            ("tasks/fails.sh", "#!/bin/sh\ncat > /dev/null\necho no wonder >&2\nexit 3\n"),
        ] {
            std::fs::write(folder.join(file), text).expect("a file");
            std::fs::set_permissions(folder.join(file), PermissionsExt::from_mode(0o755)).expect("its run bit");
        }
        std::fs::write(folder.join("crontab"), crontab).expect("a crontab");
        Folder(folder)
    }

    fn effects(&self) -> PathBuf {
        self.0.join("effects")
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// What each run of a task was told, in order; times are only looked at for their form.
fn told(effects: &Path) -> Vec<Vec<Value>> {
    let text = std::fs::read_to_string(effects).unwrap_or_default();
    let mut told: Vec<Vec<Value>> = text
        .lines()
        .map(|line| {
            let mut parts: Vec<Value> = line.split('\t').map(Value::from).collect();
            let time = parts[6].as_str().expect("a time").replace(|c: char| c.is_ascii_digit(), "0");
            parts[6] = time.into();
            parts[7] = serde_json::from_str(parts[7].as_str().expect("a body")).expect("JSON");
            parts
        })
        .collect();
    told.sort_by_key(|parts| Value::from(parts.clone()).to_string());
    told
}

/// Runs the command line on the folder until everything has run, and returns what came of it.
async fn effect_of(name: &str, command_line: CommandLine, crontab: &str) -> (Vec<Vec<Value>>, Value) {
    let db = Db::ours().await;
    db.run(
        "insert into graphile_worker._private_known_crontabs (identifier, known_since, last_execution)
         values ('daily', now() - interval '2 days', now() - interval '23 hours');
         select graphile_worker.add_job('tell', '{\"n\": 1, \"text\": \"a b\"}', job_key := 'key', priority := 3);
         select graphile_worker.add_job('nested/deep/tell', '[1, 2]', max_attempts := 7);
         select graphile_worker.add_job('nested/deep/tell', queue_name := 'queue');
         select graphile_worker.add_job('fails', max_attempts := 1)",
    )
    .await;
    let folder = Folder::new(name, crontab);
    let effects = folder.effects();
    let worker = command_line.start_with(&db, &folder.0, &[], &[("EFFECTS", effects.to_str().expect("text"))]);
    patiently("all to be told", async {
        while told(&effects).len() < 4 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    })
    .await;
    db.until("select count(*) = 0 from graphile_worker.jobs where locked_at is not null or attempts = 0").await;
    worker.signal("TERM");
    worker.ended().await;
    let left = db
        .value(
            "select json_agg(json_build_array(task_identifier, attempts, max_attempts, locked_by, last_error is not null))
             from graphile_worker.jobs",
        )
        .await;
    (told(&effects), left)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_folder_of_executables_with_a_crontab_has_the_same_effect() {
    // Due an hour ago, and missed.
    let due = Utc::now() - Span::hours(1);
    let crontab = format!("{} {} * * * tell ?id=daily&fill=3h&max=4 {{from: 'crontab'}}\n", due.minute(), due.hour());
    let ours = effect_of("ours", CommandLine::Ours(env!("CARGO_BIN_EXE_ours")), &crontab).await;
    assert_eq!(ours.0.len(), 4);
    for package in ["graphile-worker", "graphile-worker-0.17"] {
        assert_eq!(ours, effect_of(package, CommandLine::Nodes(package), &crontab).await, "{package}");
    }
}
