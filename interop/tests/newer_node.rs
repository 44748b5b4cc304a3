//! What takes a newer Node than the library's own tests can count on: modules that tasks import are read again with them.

#![allow(missing_docs)]

use graphile_worker_interop::{CommandLine, Db, node_program};
use std::path::{Path, PathBuf};
use std::process::Command;

const OURS: CommandLine = CommandLine::Ours(env!("CARGO_BIN_EXE_ours"));

#[test]
fn the_script_of_the_javascript_host_passes_its_tests_there_too() {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR")).join("../crates/graphile_worker_scripts/tests/hosts");
    let output = Command::new(node_program()).args(["--test", "node_host.test.mjs"]).current_dir(tests).output();
    let output = output.expect("Node runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stdout));
}

/// A folder of tasks that each say a word of a library beside the folder.
struct Project(PathBuf);

impl Project {
    fn new() -> Project {
        let project = Project(std::env::temp_dir().join(format!("gw-interop-{}-libraries", std::process::id())));
        for folder in ["tasks", "lib"] {
            std::fs::create_dir_all(project.0.join(folder)).expect("a folder");
        }
        project.write_libraries("old");
        project.write_tasks();
        project.write("tasks/other.mjs", "export default () => {};");
        project
    }

    fn write(&self, file: &str, text: &str) {
        std::fs::write(self.0.join(file), text).expect("a file");
    }

    fn write_libraries(&self, word: &str) {
        for (file, text) in [
            ("lib/words.mjs", format!("export {{ word }} from './inner.mjs'; // {word}")),
            ("lib/inner.mjs", format!("export const word = '{word}';")),
            ("lib/words.ts", format!("export const word: string = '{word}';")),
            ("lib/words.cjs", format!("exports.word = '{word}';")),
        ] {
            self.write(file, &text);
        }
    }

    fn write_tasks(&self) {
        for (file, text) in [
            (
                "tasks/module.mjs",
                "import { word } from '../lib/words.mjs';
                 export default ({ when }, { logger }) => logger.info(`${when}: module says ${word}`);",
            ),
            (
                "tasks/typed.ts",
                "import { word } from '../lib/words.ts';
                 export default ({ when }: { when: string }, { logger }: any): void => logger.info(`${when}: typed says ${word}`);",
            ),
            (
                "tasks/common.js",
                "const { word } = require('../lib/words.cjs');
                 module.exports = ({ when }, { logger }) => logger.info(`${when}: common says ${word}`);",
            ),
        ] {
            self.write(file, text);
        }
    }
}

impl Drop for Project {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_edited_library_takes_effect_when_the_task_that_imports_it_is_saved() {
    let db = Db::ours().await;
    let project = Project::new();
    let worker = OURS.start(&db, &project.0, &["--watch"]);
    let all_say = async |when: &str, word: &str| {
        for task in ["module", "typed", "common"] {
            db.run(&format!("select graphile_worker.add_job('{task}', json_build_object('when', '{when}'))")).await;
            worker.says(&format!("{when}: {task} says {word}")).await;
        }
    };
    let changed = async |task: &str| {
        worker.says(&format!("task changed (change: changed, task_identifier: {task})")).await;
    };
    all_say("at first", "old").await;

    // Libraries are not watched: when a later edit in the folder of tasks is noticed, they are what they were.
    project.write_libraries("new");
    project.write("tasks/other.mjs", "export default () => 1;");
    changed("other").await;
    all_say("edited", "old").await;

    project.write_tasks();
    for task in ["module", "typed", "common"] {
        changed(task).await;
    }
    all_say("saved", "new").await;
}
