//! Templates for `--format`: the part of Go's text/template that scripts for podman and docker use.
//!
//! - Actions: `{{.Field.Field}}`, pipelines, parentheses, variables, literals, comments, `{{-` and `-}}`.
//! - Blocks: `if`, `else if`, `with`, `range` (lists and maps), `else`, `end`.
//! - Functions: see [`call::FUNCTIONS`].
//!
//! Everything else (`define`, `template`, `break`, methods of Go's types) is refused by name. A missing
//! field of an object is an error that lists the fields; a missing key of a map prints `<no value>`, as
//! in Go. Texts of the data are printed with control characters in visible form, except by `json`.
//!
//! The crates for such templates (gotmpl 0.6, gtmpl-ng 1.0) know maps and no structures: a missing field
//! would print `<no value>` and exit with 0, where podman fails, and JSON would lose the order of fields.
//!
//! Uses `output` and `text`.

mod call;
mod read;
mod value;

use anyhow::{Context, Result};
use serde::Serialize;

use read::{Node, Pipeline, Root, Term};
pub(crate) use value::Value;
use value::{Invalid, field};

/// A template that was read.
#[derive(Debug)]
pub(crate) struct Template {
    text: String,
    nodes: Vec<Node>,
}

impl Template {
    /// Reads a template. `\t` and `\n` become a tab and a line feed, as in podman and docker.
    pub(crate) fn read(text: &str) -> Result<Self> {
        let plain = text.replace("\\t", "\t").replace("\\n", "\n");
        let nodes = read::template(&plain);
        let nodes = nodes.with_context(|| format!("cannot read the format '{text}'"))?;
        Ok(Self { text: text.to_owned(), nodes })
    }

    /// Fills it with data.
    pub(crate) fn fill<T: Serialize + ?Sized>(&self, data: &T) -> Result<String> {
        let data = Value::of(data)?;
        let mut run = Run { variables: vec![(String::new(), data.clone())], out: String::new() };
        let filled = run.nodes(&self.nodes, &data);
        filled.with_context(|| format!("cannot fill the format '{}'", self.text))?;
        Ok(run.out)
    }
}

/// A template that is being filled.
struct Run {
    /// The names in scope, innermost last; the first is `$`, the whole data.
    variables: Vec<(String, Value)>,
    out: String,
}

impl Run {
    fn nodes(&mut self, nodes: &[Node], dot: &Value) -> Result<(), Invalid> {
        for node in nodes {
            let scope = self.variables.len();
            match node {
                Node::Text(text) => self.out.push_str(text),
                Node::Action(pipeline) => {
                    let value = self.pipeline(pipeline, dot)?;
                    if pipeline.variables.is_empty() {
                        self.out.push_str(&value.shown());
                    }
                    continue; // a variable stays until the block ends
                }
                Node::If(head, body, otherwise) => {
                    let value = self.pipeline(head, dot)?;
                    self.nodes(if value.is_true() { body } else { otherwise }, dot)?;
                }
                Node::With(head, body, otherwise) => {
                    let value = self.pipeline(head, dot)?;
                    match value.is_true() {
                        true => self.nodes(body, &value)?,
                        false => self.nodes(otherwise, dot)?,
                    }
                }
                Node::Range(head, body, otherwise) => self.range(head, body, otherwise, dot)?,
            }
            self.variables.truncate(scope);
        }
        Ok(())
    }

    fn range(
        &mut self,
        head: &Pipeline,
        body: &[Node],
        otherwise: &[Node],
        dot: &Value,
    ) -> Result<(), Invalid> {
        let items: Vec<(Value, Value)> = match self.value(head, dot)? {
            Value::List(list) => {
                list.into_iter().enumerate().map(|(n, v)| (Value::Int(n as i64), v)).collect()
            }
            Value::Map(mut map) => {
                map.sort_by(|a, b| a.0.cmp(&b.0));
                map.into_iter().map(|(key, value)| (Value::Text(key), value)).collect()
            }
            Value::None => Vec::new(),
            other => return Err(Invalid::new(format!("'range' over {}", other.kind()))),
        };
        if items.is_empty() {
            return self.nodes(otherwise, dot);
        }
        let scope = self.variables.len();
        for (key, value) in items {
            match head.variables.as_slice() {
                [] => {}
                [name] => self.variables.push((name.clone(), value.clone())),
                [first, second] => {
                    self.variables.push((first.clone(), key));
                    self.variables.push((second.clone(), value.clone()));
                }
                _ => return Err(Invalid::new("'range' with more than two variables")),
            }
            self.nodes(body, &value)?;
            self.variables.truncate(scope);
        }
        Ok(())
    }

    /// The value of a pipeline, which its variable receives.
    fn pipeline(&mut self, pipeline: &Pipeline, dot: &Value) -> Result<Value, Invalid> {
        let value = self.value(pipeline, dot)?;
        match pipeline.variables.as_slice() {
            [] => {}
            [name] if pipeline.assigns => {
                let known = self.variables.iter_mut().rev().find(|(n, _)| n == name);
                known.ok_or_else(|| undefined(name))?.1 = value.clone();
            }
            [name] => self.variables.push((name.clone(), value.clone())),
            _ => return Err(Invalid::new("only 'range' has two variables")),
        }
        Ok(value)
    }

    fn value(&mut self, pipeline: &Pipeline, dot: &Value) -> Result<Value, Invalid> {
        let mut last = None;
        for command in &pipeline.commands {
            last = Some(self.command(command, last, dot)?);
        }
        Ok(last.unwrap_or(Value::None))
    }

    fn command(
        &mut self,
        command: &[Term],
        last: Option<Value>,
        dot: &Value,
    ) -> Result<Value, Invalid> {
        let Some((first, rest)) = command.split_first() else { return Ok(Value::None) };
        if let Root::Function(name) = &first.root {
            let mut arguments = Vec::with_capacity(rest.len() + 1);
            for term in rest {
                arguments.push(self.term(term, dot)?);
            }
            arguments.extend(last);
            return call::call(name, &arguments);
        }
        if !rest.is_empty() || last.is_some() {
            return Err(Invalid::new("only a function has arguments"));
        }
        self.term(first, dot)
    }

    fn term(&mut self, term: &Term, dot: &Value) -> Result<Value, Invalid> {
        let made;
        let mut value = match &term.root {
            Root::Dot => dot,
            Root::Literal(value) => value,
            Root::Variable(name) => {
                let known = self.variables.iter().rev().find(|(n, _)| n == name);
                &known.ok_or_else(|| undefined(name))?.1
            }
            Root::Function(name) => {
                made = call::call(name, &[])?;
                &made
            }
            Root::Pipeline(inner) => {
                made = self.value(inner, dot)?;
                &made
            }
        };
        for name in &term.fields {
            value = field(value, name)?;
        }
        Ok(value.clone())
    }
}

fn undefined(name: &str) -> Invalid {
    Invalid::new(format!("the variable '${name}' is not defined"))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Serialize)]
    #[serde(rename_all = "PascalCase")]
    struct Data {
        name: String,
        pid: u32,
        running: bool,
        env: Vec<String>,
        labels: serde_json::Value,
        state: State,
    }

    #[derive(Serialize)]
    #[serde(rename_all = "PascalCase")]
    struct State {
        status: String,
    }

    fn data() -> Data {
        Data {
            name: "web".into(),
            pid: 7,
            running: true,
            env: vec!["A=1".into(), "B=\x1b2".into()],
            labels: json!({ "b": "2", "a": "1" }),
            state: State { status: "running".into() },
        }
    }

    fn fill(text: &str) -> Result<String> {
        Template::read(text)?.fill(&data())
    }

    #[test]
    fn template_prints_what_go_prints() {
        for (text, filled) in [
            ("", ""),
            ("plain", "plain"),
            ("{{.Name}}", "web"),
            ("{{ .State.Status }}!", "running!"),
            ("{{.Env}} {{.Labels}} {{.State}}", "[A=1 B=\\u{1b}2] map[a:1 b:2] {running}"),
            ("{{json .Env}}{{json .State}}", r#"["A=1","B=\u001b2"]{"Status":"running"}"#),
            ("{{.State | json}}", r#"{"Status":"running"}"#),
            ("{{range .Env}}[{{.}}]{{end}}", "[A=1][B=\\u{1b}2]"),
            ("{{range $i, $e := .Env}}{{$i}}{{len $e}}{{$.Name}} {{end}}", "03web 14web "),
            ("{{range $k, $v := .Labels}}{{$k}}={{$v}};{{end}}", "a=1;b=2;"),
            ("{{range .Labels}}{{else}}none{{end}}", ""),
            ("{{if .Running}}up{{else}}down{{end}}", "up"),
            ("{{if not .Running}}a{{else if eq .Pid 7}}b{{else}}c{{end}}", "b"),
            ("{{if and .Running (gt .Pid 7)}}a{{else}}b{{end}}", "b"),
            ("{{with .State}}{{.Status}}{{end}}", "running"),
            ("{{with .Labels.none}}x{{else}}y{{end}}", "y"),
            ("{{$x := .Name}}{{$x}}{{$x = .Pid}}{{$x}}", "web7"),
            ("{{.Labels.none}}|{{index .Labels \"a\"}}|{{index .Env 0}}", "<no value>|1|A=1"),
            ("a {{- /* comment */ -}} b", "ab"),
            ("a {{- .Name -}} b", "awebb"),
            ("{{upper .Name}}{{title .Name}}{{lower \"AB\"}}", "WEBWebab"),
            ("{{join .Env \",\"}} {{split .Name \"e\"}}", "A=1,B=\\u{1b}2 [w b]"),
            (r#"{{join .Env "\n"}}"#, "A=1\nB=\\u{1b}2"),
            (r"a\tb\n", "a\tb\n"),
            (
                "{{printf \"%s-%d %q %5s|%-5s|%t %v%%\" .Name .Pid .Name .Name .Name .Running .Pid}}",
                "web-7 \"web\"   web|web  |true 7%",
            ),
            ("{{print .Name .Pid}}{{println `x` 1}}", "web7x 1\n"),
            ("{{truncate .Name 2}}{{slice .Name 1 2}}", "wee"),
            ("{{(index .Env 0) | len}}", "3"),
            ("{{eq .Name \"a\" \"web\"}} {{ne .Pid 7}} {{or .Labels.none \"z\"}}", "true false z"),
            ("{{\"{{\"}}", "{{"),
        ] {
            assert_eq!(fill(text).unwrap(), filled, "{text}");
        }
    }

    #[test]
    fn unknown_parts_of_a_template_are_refused_by_name() {
        for (text, named) in [
            ("{{.Nope}}", "no field is called 'Nope'; there are Name, Pid"),
            ("{{.Name.Nope}}", "a text has no field 'Nope'"),
            ("{{nofn .Name}}", "no function is called 'nofn'"),
            ("{{.Name", "'{{' without '}}'"),
            ("{{if .Name}}", "'{{if}}' without '{{end}}'"),
            ("{{end}}", "'{{end}}' without a block"),
            ("{{template \"x\"}}", "'template' is not supported"),
            ("{{define \"x\"}}", "'define' is not supported"),
            ("{{$x}}", "the variable '$x' is not defined"),
            ("{{.Name .Pid}}", "only a function has arguments"),
            ("{{range .Name}}{{end}}", "'range' over a text"),
            ("{{index .Env 9}}", "index 9"),
            ("{{printf \"%y\" 1}}", "%y"),
            ("{{len .Pid}}", "len"),
            ("{{\"x}}", "a text has no end"),
            ("{{lt .Name 1}}", "lt"),
            ("{{(.Name}}", "'(' without ')'"),
            ("{{.Name)}}", "')' without '('"),
            ("{{}}", "a command is missing"),
            ("{{#}}", "'#'"),
        ] {
            let error = format!("{:#}", fill(text).expect_err(text));
            assert!(error.contains(named) && error.contains("the format"), "{text}: {error}");
        }
        let deep = format!("{}x{}", "{{if .Name}}".repeat(5000), "{{end}}".repeat(5000));
        assert!(format!("{:#}", fill(&deep).unwrap_err()).contains("inside one another"));
        let deep = format!("{{{{{}.{}}}}}", "(".repeat(5000), ")".repeat(5000));
        assert!(format!("{:#}", fill(&deep).unwrap_err()).contains("inside one another"));
    }

    proptest::proptest! {
        #[test]
        fn filling_any_template_does_not_panic(
            text in concat!(
                "(\\{\\{|\\}\\}|[a-z]| |\\.|\\$|\"|`|\\(|\\)|\\||-|:=|if|end|range|else|",
                "\\.Name|é|%|\\\\|[0-9]|,){0,30}"
            )
        ) {
            let _ = fill(&text);
        }
    }
}
