//! Completion in real shells: what is offered after the program's name, after each subcommand and after the value of a flag.
//! `make test` installs the shells. If zsh or fish is missing, its test is skipped, but fails if `CI` is set.

use crate::support::{Folder, graphile_worker, texts};
use std::process::Command;

/// What is typed, and what has to be among what is offered.
const TYPED: [(&str, &[&str]); 13] = [
    ("", &["list", "why", "crontab", "completions", "grant"]),
    ("wo", &["workers"]),
    ("list --", &["--state", "--newest", "--json", "--connection"]),
    ("why --", &["--json"]),
    ("grant --", &["--add", "--run", "--read", "--revoke", "--apply"]),
    ("run-now --", &["--json"]),
    ("crontab ", &["check", "next"]),
    ("limit ", &["set", "list", "drop"]),
    ("limit set --", &["--concurrency", "--rate", "--burst", "--weight", "--cost", "--group", "--json"]),
    ("pause --", &["--until", "--json"]),
    ("crontab next --", &["--count", "--from"]),
    ("completions ", &["bash", "zsh", "fish"]),
    ("dev --", &["--reset", "--jobs"]),
];

fn script(shell: &str) -> (Folder, String) {
    let folder = Folder::new();
    let text = texts(&graphile_worker(&["completions", shell]).output().unwrap()).0;
    let path = folder.write(&format!("completions/_graphile-worker.{shell}"), &text);
    (folder, path.to_str().unwrap().to_owned())
}

/// A shell that is not installed is named in the output of the test.
fn is_installed(shell: &str) -> bool {
    let found = Command::new(shell).arg("-c").arg("exit 0").status().is_ok_and(|status| status.success());
    if !found {
        assert!(std::env::var_os("CI").is_none(), "{shell} is not installed: run scripts/install-test-programs");
        eprintln!("{shell} is not installed: its completion was not tried");
    }
    found
}

fn assert_offered(typed: &str, offered: &str, wanted: &[&str]) {
    let words: Vec<&str> = offered.split_whitespace().collect();
    for word in wanted {
        assert!(words.contains(word), "after {typed:?} {word} is not among {words:?}");
    }
}

#[test]
fn bash_completes_subcommands_and_their_flags() {
    let (_folder, path) = script("bash");
    for (typed, wanted) in TYPED {
        let complete = r#"
            source "$1"; shift
            COMP_WORDS=(graphile-worker "$@"); COMP_CWORD=$#
            "$(complete -p graphile-worker | sed -E 's/.*-F ([^ ]+).*/\1/')" graphile-worker "${!#}" ""
            printf '%s\n' "${COMPREPLY[@]}"
        "#;
        let mut bash = Command::new("bash");
        bash.args(["--norc", "-eu", "-c", complete, "bash", &path]).args(typed.split(' '));
        let output = bash.output().unwrap();
        let (offered, errors) = texts(&output);
        assert!(output.status.success() && errors.is_empty(), "{errors}");
        assert_offered(typed, &offered, wanted);
    }
}

#[test]
fn fish_completes_subcommands_and_their_flags() {
    if !is_installed("fish") {
        return;
    }
    let (_folder, path) = script("fish");
    for (typed, wanted) in TYPED {
        if typed == "completions " {
            // clap_complete knows no values of positional arguments in fish.
            continue;
        }
        let complete = format!("source '{path}'; complete -C 'graphile-worker {typed}'");
        let output = Command::new("fish").args(["--no-config", "-c", &complete]).output().unwrap();
        let (offered, errors) = texts(&output);
        assert!(output.status.success() && errors.is_empty(), "{errors}");
        assert_offered(typed, &offered, wanted);
    }
}

#[test]
fn zsh_completes_subcommands_and_their_flags() {
    if !is_installed("zsh") {
        return;
    }
    let (_folder, path) = script("zsh");
    // A shell in a terminal of its own, whose Tab key lists what would be offered. Its prompt shows that it reads keys.
    let complete = r#"
        zmodload zsh/zpty
        zpty shell zsh -f -i
        zpty -w shell "PROMPT= RPROMPT=; stty cols 200 rows 200; autoload -Uz compinit; compinit -u -D; source '$1'"
        zpty -w shell "zstyle ':completion:*' list-prompt ''; zstyle ':completion:*' menu no; LISTMAX=10000"
        zpty -w shell "compdef _graphile-worker graphile-worker; bindkey '^I' list-choices; PROMPT='RE''ADY> '"
        zpty -r -m shell ready '*READY> *'
        zpty -w -n shell "graphile-worker $2"$'\t'
        zpty -w -n shell $'\C-u'"print DO''NE"$'\n'
        zpty -r -m shell answer '*DONE*'
        print -r -- "$answer"
        zpty -d shell
    "#;
    for (typed, wanted) in TYPED {
        if typed == "wo" {
            // The only one that fits is filled in, not listed.
            continue;
        }
        let output = Command::new("zsh").args(["-f", "-c", complete, "zsh", &path, typed]).output().unwrap();
        let (offered, errors) = texts(&output);
        assert!(output.status.success(), "{errors}");
        // Escape sequences stand right before the words.
        let listed = offered.split_once('\t').map_or(&*offered, |(_, listed)| listed);
        for word in wanted {
            assert!(listed.contains(word), "after {typed:?} {word} is not in {listed:?}");
        }
    }
}
