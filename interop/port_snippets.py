#!/usr/bin/env python3
"""How many Rust snippets of the Rust port's README and guide compile against this library: `make port-snippets`.

The snippets come from the source of the port, the crate graphile_worker that bench/rust_port pins, as cargo has downloaded
it. Most of them are fragments. Each one gets a module with a function around it, and the imports, tasks, variables and
functions that it names but does not define. All modules are compiled against the port first: a snippet that does not compile
there is not counted. The rest is compiled against this library.

Prints the two numbers, and the failures by reason. `--keep N` fails if fewer than N compile.
"""

import argparse
import collections
import json
import pathlib
import re
import shutil
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent
PORT = ROOT / "bench/rust_port/Cargo.toml"

# Crates that snippets name, beside the worker itself.
DEPENDENCIES = """
anyhow = "1"
chrono = { version = "0.4", features = ["serde"] }
rand = "0.10"
serde = { version = "1", features = ["derive"] }
serde_json = "1"
sqlx = { version = "0.9", default-features = false, features = ["postgres", "runtime-tokio", "chrono", "json"] }
tokio = { version = "1", features = ["full"] }
tokio-postgres = "0.7"
tracing = "0.1"
tracing-subscriber = { version = "0.3", features = ["env-filter"] }
"""

# What a snippet may use without importing it. The names of the worker come from a glob, so that a snippet can define its own.
IMPORTS = {
    "Arc": "std::sync::Arc",
    "AtomicU64": "std::sync::atomic::AtomicU64",
    "AtomicUsize": "std::sync::atomic::AtomicUsize",
    "Ordering": "std::sync::atomic::Ordering",
    "Deserialize": "serde::Deserialize",
    "Serialize": "serde::Serialize",
    "json": "serde_json::json",
    "Utc": "chrono::Utc",
}

# Variables that a snippet may use without defining them.
VARIABLES = {
    "pg_pool": "sqlx::PgPool",
    "pool": "sqlx::PgPool",
    "database": "crate::Database",
    "database_url": "String",
    "worker": "graphile_worker::Worker",
    "utils": "graphile_worker::WorkerUtils",
    "helpers": "graphile_worker::WorkerUtils",
    "worker_utils": "graphile_worker::WorkerUtils",
    "ctx": "graphile_worker::WorkerContext",
    "payload": "serde_json::Value",
    "run_at": "chrono::DateTime<chrono::Utc>",
    "account_id": "i64",
    "user_id": "i64",
    "project_id": "i64",
    "report_id": "i64",
    "order": "crate::Order",
    "app_config": "crate::AppConfig",
    "spec": "graphile_worker::JobSpec",
}

# Variables that hold tasks.
TASK_VARIABLES = {"urgent_email": "SendEmail", "normal_email": "SendEmail"}

# Functions that a snippet may call without defining them.
FUNCTIONS = {
    "send_notification": "async fn send_notification<T>(_: T) -> Result<(), String> { Ok(()) }",
    "send_email": "async fn send_email<A, B>(_: A, _: B) -> Result<(), String> { Ok(()) }",
    "call_service": "async fn call_service<A, B>(_: A, _: B) -> Result<(), String> { Ok(()) }",
    "should_retry": "fn should_retry<T>(_: &T) -> bool { true }",
    "save_order": "async fn save_order<A, B>(_: A, _: B) -> Result<(), String> { Ok(()) }",
    "update_application_state": "async fn update_application_state<A>(_: A) -> Result<(), String> { Ok(()) }",
    "run_worker": "async fn run_worker() -> Result<(), Box<dyn std::error::Error>> { Ok(()) }",
    "wait_for_application_shutdown": "async fn wait_for_application_shutdown() {}",
    "host_shutdown": "async fn host_shutdown() {}",
    "on_shutdown": "async fn on_shutdown() {}",
    "shutdown_requested": "async fn shutdown_requested() {}",
    "jobs": "fn jobs() -> [graphile_worker::JobDefinition; 0] { [] }",
    "reporting_jobs": "fn reporting_jobs() -> [graphile_worker::JobDefinition; 0] { [] }",
}

# Other types that a snippet may use without defining them.
TYPES = {
    "AppState": """#[derive(Clone, Debug, Default)] pub struct AppState { pub api_key: String }
        impl AppState { pub fn increment_run_count(&self) -> usize { 0 } }""",
    "LoggingPlugin": "PLUGIN",
    "LocalQueueMonitorPlugin": "PLUGIN",
    "MetricsPlugin": """pub struct MetricsPlugin {
            pub jobs_started: std::sync::atomic::AtomicU64,
            pub jobs_completed: std::sync::atomic::AtomicU64,
            pub jobs_failed: std::sync::atomic::AtomicU64,
        }
        impl graphile_worker::Plugin for MetricsPlugin { fn register(self, _: &mut graphile_worker::HookRegistry) {} }""",
}
PLUGIN = """#[derive(Default)] pub struct {name};
    impl graphile_worker::Plugin for {name} {{ fn register(self, _: &mut graphile_worker::HookRegistry) {{}} }}"""

TASK = """impl graphile_worker::TaskHandler for {name} {{
    const IDENTIFIER: &'static str = "{name}";
    async fn run(self, _: graphile_worker::WorkerContext) -> impl graphile_worker::IntoTaskHandlerResult {{}}
}}"""
BATCH = """impl graphile_worker::BatchTaskHandler for {name} {{
    const IDENTIFIER: &'static str = "{name}";
    async fn run_batch(_: Vec<Self>, _: graphile_worker::WorkerContext) -> impl graphile_worker::IntoBatchTaskHandlerResult {{
        Ok::<(), String>(())
    }}
}}"""

LIBRARY = """#![allow(warnings)]
pub type Database = {database};
#[derive(Clone)] pub struct Order {{ pub id: i64 }}
#[derive(Clone, Debug)] pub struct AppConfig;
"""


def snippets(source):
    """File, line and text of each, in the order of the guide."""
    for file in [source / "README.md", *sorted((source / "docs/src").rglob("*.md"))]:
        text, indent, start = None, 0, 0
        for number, line in enumerate(file.read_text().splitlines(keepends=True), 1):
            if text is None:
                if fence := re.match(r"( *)```rust\b", line):
                    text, indent, start = "", len(fence[1]), number + 1
            elif line.strip() == "```":
                yield f"{file.relative_to(source)}:{start}", text
                text = None
            else:
                text += line[indent:]


def names(text, name):
    return re.search(rf"\b{name}\b", text)


def defines(text, name):
    return re.search(rf"\b(struct|enum|fn|type|trait) {name}\b", text)


def imports(text, name):
    return re.search(rf"\buse [^;]*\b{name}\b[^;]*;", text)


def tasks(text):
    """The tasks that it names and does not define."""
    patterns = [
        r"(?:define_job|define_batch_job|add_jobs|[a-z_]+_(?:minute|minutes|at|on))::<(\w+)>",
        r"impl (?:Batch)?TaskHandler for (\w+)",
        r"\b([A-Z]\w+)::definition\(\)",
        r"(?:add_job|payload|vec!)[(\[]\s*([A-Z]\w+)\s*\{",
        r"[(\[]\(?\s*([A-Z]\w+) \{[^}]*\},\s*&\w+",
        r"=\s*(SendEmail) \{",
        r"\b(SendEmail|CheckWs|PendingNotification) \{",
    ]
    found = {name for pattern in patterns for name in re.findall(pattern, text)}
    found |= {task for variable, task in TASK_VARIABLES.items() if names(text, variable)}
    found.discard("RawJobSpec")
    return sorted(name for name in found if not defines(text, name) and not imports(text, name))


def fields(text, name):
    """The fields that a task needs, by the values that the snippet gives them or the way it uses them."""
    found = {}
    for body in re.findall(rf"(?<!struct )(?<!for )\b{name} \{{([^}}]*)\}}", text):
        for field, value in re.findall(r"(\w+)\s*:\s*([^,\n]+)", re.sub(r"/\*.*?\*/|//.*", "", body)):
            is_text = re.search(r"\.into\(\)|to_string|to_owned|format!|self\.", value)
            found[field] = "String" if is_text else "i64"
        for field in re.findall(r"^\s*(\w+)\s*,?\s*$", re.sub(r"/\*.*?\*/|//.*", "", body), re.M):
            found.setdefault(field, "i64")
    if re.search(rf"impl (?:Batch)?TaskHandler for {name}\b", text):
        for field in re.findall(r"\b(?:self|item)\.(\w+)\b(?!\()", text):
            found.setdefault(field, "String")
    return found


def task(text, name):
    body = "".join(f"pub {field}: {kind}, " for field, kind in fields(text, name).items())
    stub = f"#[derive(Clone, Debug, serde::Serialize, serde::Deserialize)] pub struct {name} {{ {body} }}\n"
    is_batch = re.search(rf"define_batch_job::<{name}>|add_batch_job\(\s*vec!\[\s*{name}\b", text)
    if is_batch and not re.search(rf"impl BatchTaskHandler for {name}\b", text):
        stub += BATCH.format(name=name)
    elif not re.search(rf"impl (?:Batch)?TaskHandler for {name}\b", text):
        stub += TASK.format(name=name)
    return stub


def module(text):
    """The snippet in a function, with what it lacks."""
    # The glob also brings modules with the names of crates.
    lines = ["use graphile_worker::*;", "use ::{sqlx, tokio_postgres, tracing};"]
    if "rand::rng()" in text:
        lines.append("use rand::RngExt;")
    for name, path in IMPORTS.items():
        if names(text, name) and not imports(text, name) and not defines(text, name):
            lines.append(f"use {path};")
    if names(text, "Duration") and not imports(text, "Duration"):
        of_chrono = re.search(r"(?<!chrono::)\bDuration::(seconds|minutes|hours|days)\(", text)
        lines.append("use chrono::Duration;" if of_chrono else "use std::time::Duration;")
    named = tasks(text)
    lines += [task(text, name) for name in named]
    for name, stub in TYPES.items():
        if names(text, name) and not defines(text, name) and not imports(text, name):
            lines.append(PLUGIN.format(name=name) if stub == "PLUGIN" else stub)
    for name, stub in FUNCTIONS.items():
        if re.search(rf"\b{name}\(", text) and not defines(text, name) and not imports(text, name):
            lines.append(stub)
    if re.search(r"(?<!\.)\bmigrate\(", text) and not imports(text, "migrate"):
        lines.append("use crate::migrate;")
    parameters = [f"mut {name}: {kind}" for name, kind in VARIABLES.items() if names(text, name)]
    parameters += [f"{name}: {kind}" for name, kind in TASK_VARIABLES.items() if names(text, name)]
    if re.search(r"&jobs\b", text) and "let jobs" not in text:
        lines.append(task("", "Any"))
        parameters.append("jobs: Vec<(Any, &graphile_worker::JobSpec)>")
    # A part of a chain, and lines that are an expression each.
    if text.lstrip().startswith("."):
        text = "graphile_worker::WorkerOptions::default()" + text.lstrip()
    body = re.sub(r"^((?:Cron|HookResult|JobScheduleResult|JobRecoveryResult)::[^{\n;]*[)?\w])$(?=\n\w)", r"\1;", text, flags=re.M)
    body = re.sub(r"^(JobRecoveryResult::\w+ \{[^}]*\})$", r"\1;", body, flags=re.M)
    # Tasks that it defines and uses, but whose handler it leaves out.
    for name in set(re.findall(r"add_job\(\s*([A-Z]\w+) \{", text)):
        if defines(text, name) and not re.search(rf"TaskHandler for {name}\b", text):
            body = TASK.format(name=name) + "\n" + body
    lines.append(f"async fn snippet({', '.join(parameters)}) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {{")
    return "\n".join([*lines, "let _ = {", body, "};", "Ok(())", "}"]) + "\n"


def compile_all(name, dependency, library, lock, target, texts):
    """Why each of the others does not compile, by the name of its module."""
    folder = ROOT / "target/port_snippets" / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "src").mkdir(parents=True)
    (folder / "Cargo.toml").write_text(
        f'[package]\nname = "port_snippets"\nversion = "0.1.0"\nedition = "2024"\n\n[workspace]\n\n[profile.dev]\n'
        f"debug = false\n\n[dependencies]\n{dependency}{DEPENDENCIES}"
    )
    shutil.copy(lock, folder / "Cargo.lock")
    for module_name, text in texts.items():
        (folder / f"src/{module_name}.rs").write_text(text)
    failures = {}
    while True:
        modules = [module_name for module_name in texts if module_name not in failures]
        text = library + "".join(f"mod {module_name};\n" for module_name in modules)
        (folder / "src/lib.rs").write_text(text)
        command = ["cargo", "check", "--quiet", "--message-format=json", "--target-dir", target]
        output = subprocess.run(command, cwd=folder, stdout=subprocess.PIPE, text=True)
        found = {}
        for line in output.stdout.splitlines():
            message = json.loads(line).get("message") or {}
            if message.get("level") == "error":
                for module_name in {module_name for span in message["spans"] for module_name in modules_of(span)}:
                    code = (message.get("code") or {}).get("code", "")
                    found.setdefault(module_name, f"{code} {message['message'].splitlines()[0]}".strip())
        if output.returncode == 0:
            return failures
        if not found:
            sys.exit(f"cargo check failed in {folder}, not because of a snippet")
        failures |= found


def modules_of(span):
    """The snippet that an error is in, also if it is in a macro that the snippet calls."""
    while span:
        if file := re.search(r"src/(s\d+)\.rs$", span["file_name"]):
            yield file[1]
            return
        span = (span.get("expansion") or {}).get("span")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=int, default=0, metavar="N", help="fail if fewer than N compile")
    arguments = parser.parse_args()
    metadata = subprocess.run(
        ["cargo", "metadata", "--locked", "--format-version=1", f"--manifest-path={PORT}"],
        check=True, stdout=subprocess.PIPE, text=True,
    )
    packages = {package["name"]: package for package in json.loads(metadata.stdout)["packages"]}
    port = packages["graphile_worker"]
    found = list(snippets(pathlib.Path(port["manifest_path"]).parent))
    places = {f"s{number:03}": place for number, (place, _) in enumerate(found)}
    texts = {f"s{number:03}": module(text) for number, (_, text) in enumerate(found)}

    # Crates of the port that its guide names.
    siblings = ["graphile_worker_ctx", "graphile_worker_migrations", "graphile_worker_task_handler"]
    of_port = [f'graphile_worker = {{ version = "={port["version"]}", features = ["driver-tokio-postgres"] }}\n']
    of_port += [f'{name} = "={packages[name]["version"]}"\n' for name in siblings]
    wrong = compile_all(
        "port", "".join(of_port),
        LIBRARY.format(database="graphile_worker::Database") + "pub use graphile_worker_migrations::migrate;\n",
        PORT.with_name("Cargo.lock"), ROOT / "bench/rust_port/target", texts,
    )
    texts = {name: text for name, text in texts.items() if name not in wrong}
    ours = f'graphile_worker = {{ path = "{ROOT / "crates/graphile_worker"}", features = ["tokio-postgres"] }}\n'
    failures = compile_all(
        "ours", ours, LIBRARY.format(database="sqlx::PgPool") + "pub use graphile_worker::migrate;\n",
        ROOT / "Cargo.lock", ROOT / "target", texts,
    )

    report(f"not counted, because they do not compile against the port {port['version']} either", wrong, places)
    report("do not compile against this library", failures, places)
    compiled = len(texts) - len(failures)
    print(f"{compiled} of {len(texts)} compile ({len(found)} snippets, {len(wrong)} not counted)")
    if compiled < arguments.keep:
        sys.exit(f"expected at least {arguments.keep}")


def report(what, failures, places):
    reasons = collections.defaultdict(list)
    for name, reason in sorted(failures.items()):
        reasons[reason].append(f"{places[name]} ({name})")
    print(f"{len(failures)} {what}:")
    for reason, where in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"  {len(where)} × {reason}")
        for place in where:
            print(f"      {place}")
    print()


if __name__ == "__main__":
    main()
