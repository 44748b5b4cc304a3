//! What the README shows is so: its shell and SQL are run, its configuration file is read, its figures are those that
//! were measured. (Its Rust is compiled by the library's documentation tests, its crontab is read by those of the crontab.)

use crate::support::{Folder, clean, empty_database, graphile_worker, one_line, run_sql, texts, value};
use std::path::Path;
use std::process::Command;

const README: &str = include_str!("../../../../README.md");
const URL: &str = "postgres://user:password@localhost/my_app";

/// Everything that stands between fences of this kind.
fn snippets(language: &str) -> Vec<&'static str> {
    let fence = format!("```{language}\n");
    README.split(&fence).skip(1).map(|rest| rest.split("```").next().unwrap()).collect()
}

/// In place of the real one: what would run for ever runs once.
const ONCE: &str = r#"#!/bin/sh
case " $* " in
  *" --once "* | *" --schema-only "* | *" --cleanup "* | *" --help "*) exec "$BINARY" "$@" ;;
esac
case "$1" in
  "" | -* | dev) exec "$BINARY" "$@" --once ;;
  *) exec "$BINARY" "$@" ;;
esac
"#;

#[tokio::test]
async fn its_shell_does_what_it_says() {
    let (database, folder) = (empty_database().await, Folder::new());
    folder.script("bin/graphile-worker", ONCE);
    folder.write("crontab", "* * * * * hello");
    let path = format!("{}:{}", folder.path().join("bin").display(), std::env::var("PATH").unwrap());
    let snippets = snippets("sh");
    assert!(snippets.len() >= 3 && snippets.iter().all(|snippet| snippet.contains("graphile-worker")));
    for snippet in snippets {
        let mut shell = clean(Command::new("sh"), &["-eu", "-c", &snippet.replace(URL, database.url())]);
        shell.current_dir(folder.path()).env("PATH", &path).env("DATABASE_URL", database.url());
        shell.env("BINARY", graphile_worker(&[]).get_program());
        let output = shell.output().unwrap();
        assert!(output.status.success(), "{snippet}\n{}{}", texts(&output).0, texts(&output).1);
    }
    assert!(folder.path().join(".graphile-worker").exists(), "`dev` has run");
    // What the quick start leads up to.
    run_sql(&database, "select graphile_worker.add_job('hello', '{\"name\": \"world\"}')").await;
    let mut command = folder.graphile_worker(&["--once"]);
    let log = texts(&command.env("DATABASE_URL", database.url()).output().unwrap()).1;
    let promised = README.lines().find(|line| line.contains("INFO: hello, I was given")).unwrap();
    let promised = promised.split_once("INFO: ").unwrap().1;
    assert!(log.lines().any(|line| line.ends_with(&format!("INFO: {promised}"))), "{promised} is not in:\n{log}");
}

#[tokio::test]
async fn its_sql_runs() {
    let database = crate::support::installed_database().await;
    run_sql(&database, "create table users (email text)").await;
    let snippets = snippets("sql");
    assert!(snippets.len() >= 3);
    for snippet in snippets {
        run_sql(&database, snippet).await;
    }
    let before = value(&database, "select count(*) from graphile_worker.jobs").await;
    run_sql(&database, "insert into users values ('user@example.com')").await;
    let after = value(&database, "select count(*) from graphile_worker.jobs").await;
    assert_eq!(after.as_i64().unwrap(), before.as_i64().unwrap() + 1, "the trigger has added a job");
}

#[tokio::test]
async fn its_configuration_file_is_one() {
    let (database, folder) = (empty_database().await, Folder::new());
    let [file] = snippets("toml")[..] else { panic!("one file is shown") };
    folder.write("worker.toml", &file.replace(URL, database.url()));
    std::fs::create_dir(folder.path().join("tasks")).unwrap();
    let output = folder.graphile_worker(&["--config", "worker.toml", "--once"]).output().unwrap();
    assert!(output.status.success(), "{}", texts(&output).1);
}

#[test]
fn its_program_is_the_example() {
    let example = std::fs::read_to_string(root().join("crates/graphile_worker_cli/examples/own_binary.rs")).unwrap();
    let [program] = snippets("rust,ignore")[..] else { panic!("one program is shown") };
    assert!(example.ends_with(program), "{program}");
}

#[test]
fn its_options_are_those_of_help_with_their_defaults() {
    let help = texts(&graphile_worker(&["--help"]).output().unwrap()).0;
    let long = help.lines().filter(|line| line.trim_start().starts_with('-')).count();
    let help = one_line(&help);
    let table = README.split("| option | default | |").nth(1).unwrap().split("\n\n").next().unwrap();
    let rows: Vec<&str> = table.lines().filter(|line| line.starts_with("| `-")).collect();
    for row in &rows {
        for flag in row.split('`').filter(|part| part.starts_with("--")) {
            assert!(help.contains(flag.split(' ').next().unwrap()), "{flag} is not in --help");
        }
        let default = row.split('|').nth(2).unwrap().trim().trim_matches('`');
        if !default.is_empty() && default.chars().all(char::is_alphanumeric) {
            assert!(help.contains(&format!("[default: {default}")), "{row}");
        }
    }
    assert_eq!(long, rows.len() + 2, "all but --help and --version are in the table");
}

#[test]
fn its_commands_of_make_and_docker_are_there() {
    let shown = snippets("console").join("");
    let makefile = std::fs::read_to_string(root().join("Makefile")).unwrap();
    for line in shown.lines() {
        let mut words = line.split_whitespace();
        match words.next() {
            Some("make") => assert!(makefile.contains(&format!("\n{}: ", words.next().unwrap())), "{line}"),
            Some("cargo") => assert!(root().join(words.last().unwrap()).join("Cargo.toml").exists(), "{line}"),
            Some("docker") => assert!(root().join("Dockerfile").exists(), "{line}"),
            other => panic!("{other:?} is not checked"),
        }
    }
    // What `docker run … graphile-worker` is given are arguments of ours.
    let arguments = shown.lines().find(|line| line.starts_with("docker run")).unwrap().rsplit("graphile-worker ");
    let arguments: Vec<&str> = arguments.into_iter().next().unwrap().split(' ').chain(["--help"]).collect();
    assert!(graphile_worker(&arguments).output().unwrap().status.success());
}

#[test]
fn its_figures_are_those_that_were_measured() {
    let results = std::fs::read_to_string(root().join("bench/RESULTS.md")).unwrap();
    let table = README.split("| | this one |").nth(1).unwrap().split("\n\n").next().unwrap();
    let mut figures = 0;
    for row in table.lines().skip(2) {
        for figure in row.split('|').skip(2).flat_map(|cell| cell.split_whitespace()) {
            let figure = figure.trim_matches(['(', ')']);
            assert!(results.contains(&format!("| {figure} ")), "{figure} of {row} is not in bench/RESULTS.md");
            figures += 1;
        }
    }
    assert!(figures > 20);
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../.."))
}
