//! Templates as they are read: texts, actions and blocks.
//!
//! Uses `value`.

use std::iter::Peekable;
use std::vec::IntoIter;

use super::value::{Invalid, Value};

/// LIMIT: blocks and parentheses inside one another.
const NESTING_MAX: usize = 64;

/// A part of a template.
#[derive(Debug)]
pub(super) enum Node {
    /// A text, printed as it is.
    Text(String),
    /// `{{PIPELINE}}`
    Action(Pipeline),
    /// `{{if PIPELINE}} ... {{else}} ... {{end}}`
    If(Pipeline, Vec<Node>, Vec<Node>),
    /// `{{with PIPELINE}} ... {{else}} ... {{end}}`
    With(Pipeline, Vec<Node>, Vec<Node>),
    /// `{{range [$KEY, $VALUE :=] PIPELINE}} ... {{else}} ... {{end}}`
    Range(Pipeline, Vec<Node>, Vec<Node>),
}

/// `[$NAME :=] COMMAND | COMMAND ...`
#[derive(Debug)]
pub(super) struct Pipeline {
    /// The variables that receive the value.
    pub variables: Vec<String>,
    /// Whether the variables exist already (`=`).
    pub assigns: bool,
    /// Each receives the value of the one before as its last argument.
    pub commands: Vec<Vec<Term>>,
}

/// An operand with the fields that are read of it.
#[derive(Debug)]
pub(super) struct Term {
    pub root: Root,
    pub fields: Vec<String>,
}

/// The first part of an operand.
#[derive(Debug)]
pub(super) enum Root {
    /// `.`
    Dot,
    /// `$NAME`; `$` is the whole data.
    Variable(String),
    /// A literal.
    Literal(Value),
    /// The name of a function.
    Function(String),
    /// `(PIPELINE)`
    Pipeline(Pipeline),
}

#[derive(Debug, Clone, PartialEq)]
enum Token {
    Word(String),
    /// `.a.b`; `.` alone has no fields.
    Fields(Vec<String>),
    /// `$name.a.b`
    Variable(String, Vec<String>),
    Literal(Value),
    Pipe,
    Open,
    /// `)`, with the fields behind it.
    Close(Vec<String>),
    Declare,
    Assign,
    Comma,
}

/// A text, or the tokens of an action.
enum Piece {
    Text(String),
    Action(Vec<Token>),
}

/// Reads a template.
pub(super) fn template(text: &str) -> Result<Vec<Node>, Invalid> {
    let mut pieces = pieces(text)?.into_iter();
    let (nodes, end) = nodes(&mut pieces, 0)?;
    match end {
        None => Ok(nodes),
        Some(word) => Err(Invalid::new(format!("'{{{{{word}}}}}' without a block before it"))),
    }
}

/// Divides a template into texts and actions.
fn pieces(text: &str) -> Result<Vec<Piece>, Invalid> {
    const SPACE: [char; 4] = [' ', '\t', '\r', '\n'];
    let mut all = Vec::new();
    let mut rest = text;
    let mut trim = false;
    while let Some(at) = rest.find("{{") {
        let (mut before, action) = (&rest[..at], &rest[at + 2..]);
        if trim {
            before = before.trim_start_matches(SPACE);
        }
        let marked = action.strip_prefix('-').filter(|rest| rest.starts_with(SPACE));
        if marked.is_some() {
            before = before.trim_end_matches(SPACE);
        }
        all.push(Piece::Text(before.to_owned()));
        let action = marked.unwrap_or(action);
        let body = action.trim_start_matches(SPACE);
        let length = match body.strip_prefix("/*") {
            Some(comment) => {
                let end = comment.find("*/").ok_or_else(|| Invalid::new("a comment has no end"))?;
                let close = &comment[end + 2..];
                let length = action.len() - close.len();
                let rest = close.trim_start_matches(SPACE);
                trim = rest.starts_with("-}}");
                if !rest.strip_prefix('-').unwrap_or(rest).starts_with("}}") {
                    return Err(Invalid::new("a comment is followed by more than '}}'"));
                }
                length
            }
            None => {
                let mut tokens = Vec::new();
                let mut lexer = Lexer { rest: action };
                while let Some(token) = lexer.token()? {
                    tokens.push(token);
                }
                let end = lexer.rest;
                trim = end.starts_with('-');
                all.push(Piece::Action(tokens));
                action.len() - end.len()
            }
        };
        let end = action[length..].find("}}").map(|at| length + at + 2);
        rest = &action[end.ok_or_else(no_end)?..];
    }
    all.push(Piece::Text(if trim { rest.trim_start_matches(SPACE) } else { rest }.to_owned()));
    all.retain(|piece| !matches!(piece, Piece::Text(text) if text.is_empty()));
    Ok(all)
}

fn no_end() -> Invalid {
    Invalid::new("'{{' without '}}'")
}

/// Reads the tokens of an action.
struct Lexer<'t> {
    rest: &'t str,
}

impl Lexer<'_> {
    /// The next token; `None` before `}}` or `-}}`.
    fn token(&mut self) -> Result<Option<Token>, Invalid> {
        let before = self.rest.len();
        self.rest = self.rest.trim_start();
        let spaced = self.rest.len() < before;
        if self.rest.starts_with("}}") || (spaced && self.rest.starts_with("-}}")) {
            return Ok(None);
        }
        let first = self.rest.chars().next().ok_or_else(no_end)?;
        let token = match first {
            '|' => self.sign(1, Token::Pipe),
            '(' => self.sign(1, Token::Open),
            ',' => self.sign(1, Token::Comma),
            ':' if self.rest.starts_with(":=") => self.sign(2, Token::Declare),
            '=' => self.sign(1, Token::Assign),
            ')' => {
                self.rest = &self.rest[1..];
                Token::Close(self.fields())
            }
            '.' if !self.rest[1..].starts_with(|c: char| c.is_ascii_digit()) => {
                let fields = self.fields();
                if fields.is_empty() {
                    self.rest = &self.rest[1..];
                }
                Token::Fields(fields)
            }
            '$' => {
                self.rest = &self.rest[1..];
                let name = self.word();
                Token::Variable(name, self.fields())
            }
            '"' => self.quoted()?,
            '`' => {
                let end = self.rest[1..].find('`').ok_or_else(|| open_text(self.rest))?;
                let text = self.rest[1..=end].to_owned();
                self.sign(end + 2, Token::Literal(Value::Made(text)))
            }
            c if c.is_ascii_digit() || matches!(c, '-' | '+' | '.') => self.number()?,
            c if c.is_alphabetic() || c == '_' => {
                let word = self.word();
                match word.as_str() {
                    "true" => Token::Literal(Value::Bool(true)),
                    "false" => Token::Literal(Value::Bool(false)),
                    "nil" => Token::Literal(Value::None),
                    _ => Token::Word(word),
                }
            }
            c => {
                return Err(Invalid::new(format!("the character {c:?} is not known in an action")));
            }
        };
        Ok(Some(token))
    }

    fn sign(&mut self, length: usize, token: Token) -> Token {
        self.rest = &self.rest[length..];
        token
    }

    fn word(&mut self) -> String {
        let is_part = |c: char| c.is_alphanumeric() || c == '_';
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(end);
        self.rest = rest;
        word.to_owned()
    }

    /// `.a.b`, if it comes next.
    fn fields(&mut self) -> Vec<String> {
        let mut fields = Vec::new();
        while let Some(rest) = self.rest.strip_prefix('.')
            && rest.starts_with(|c: char| c.is_alphanumeric() || c == '_')
        {
            self.rest = rest;
            fields.push(self.word());
        }
        fields
    }

    fn quoted(&mut self) -> Result<Token, Invalid> {
        let whole = self.rest;
        let mut text = String::new();
        let mut chars = whole.char_indices().skip(1);
        while let Some((at, c)) = chars.next() {
            match c {
                '"' => {
                    self.rest = &whole[at + 1..];
                    return Ok(Token::Literal(Value::Made(text)));
                }
                '\\' => text.push(match chars.next() {
                    Some((_, 'n')) => '\n',
                    Some((_, 't')) => '\t',
                    Some((_, 'r')) => '\r',
                    Some((_, c @ ('"' | '\\' | '\''))) => c,
                    _ => return Err(Invalid::new(format!("an escape is not known in {whole}"))),
                }),
                c => text.push(c),
            }
        }
        Err(open_text(whole))
    }

    fn number(&mut self) -> Result<Token, Invalid> {
        let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '+' | '-');
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (text, rest) = self.rest.split_at(end);
        self.rest = rest;
        let number = match text.parse::<i64>() {
            Ok(n) => Some(Value::Int(n)),
            Err(_) => text.parse::<f64>().ok().filter(|n| n.is_finite()).map(Value::Float),
        };
        let bad = || Invalid::new(format!("'{text}' is not a number"));
        number.map(Token::Literal).ok_or_else(bad)
    }
}

fn open_text(text: &str) -> Invalid {
    Invalid::new(format!("a text has no end: {text}"))
}

type Pieces = IntoIter<Piece>;

/// The nodes up to an `else` or `end`, which is returned as well.
fn nodes(pieces: &mut Pieces, depth: usize) -> Result<(Vec<Node>, Option<String>), Invalid> {
    deeper(depth)?;
    let mut all = Vec::new();
    while let Some(piece) = pieces.next() {
        let tokens = match piece {
            Piece::Text(text) => {
                all.push(Node::Text(text));
                continue;
            }
            Piece::Action(tokens) => tokens,
        };
        let mut tokens = tokens.into_iter().peekable();
        let word = match tokens.peek() {
            Some(Token::Word(word)) => word.clone(),
            _ => String::new(),
        };
        match word.as_str() {
            "if" | "with" | "range" => {
                tokens.next();
                all.push(block(&word, tokens, pieces, depth)?);
            }
            "end" | "else" => {
                tokens.next();
                // `{{else if X}}` is a block inside the `else`, which shares its `end`.
                if let Some(Token::Word(next)) = tokens.peek()
                    && word == "else"
                    && matches!(next.as_str(), "if" | "with")
                {
                    let next = next.clone();
                    tokens.next();
                    let inner = block(&next, tokens, pieces, depth + 1)?;
                    all.push(inner);
                    return Ok((all, Some(CHAIN.to_owned())));
                }
                finished(&mut tokens)?;
                return Ok((all, Some(word)));
            }
            "define" | "template" | "block" | "break" | "continue" => {
                return Err(Invalid::new(format!("'{word}' is not supported")));
            }
            _ => {
                all.push(Node::Action(pipeline(&mut tokens, depth)?));
                finished(&mut tokens)?;
            }
        }
    }
    Ok((all, None))
}

/// The end of a part whose last node is the rest of an `else if`.
const CHAIN: &str = "else if";

fn block(
    word: &str,
    mut tokens: Peekable<IntoIter<Token>>,
    pieces: &mut Pieces,
    depth: usize,
) -> Result<Node, Invalid> {
    let head = pipeline(&mut tokens, depth)?;
    finished(&mut tokens)?;
    let missing = || Invalid::new(format!("'{{{{{word}}}}}' without '{{{{end}}}}'"));
    let (mut body, end) = nodes(pieces, depth + 1)?;
    let otherwise = match end.as_deref() {
        Some("end") => Vec::new(),
        Some("else") => match nodes(pieces, depth + 1)? {
            (otherwise, Some(end)) if end == "end" => otherwise,
            _ => return Err(missing()),
        },
        Some(CHAIN) => body.pop().into_iter().collect(),
        _ => return Err(missing()),
    };
    Ok(match word {
        "if" => Node::If(head, body, otherwise),
        "with" => Node::With(head, body, otherwise),
        _ => Node::Range(head, body, otherwise),
    })
}

type Tokens = Peekable<IntoIter<Token>>;

fn pipeline(tokens: &mut Tokens, depth: usize) -> Result<Pipeline, Invalid> {
    deeper(depth)?;
    let mut all = Pipeline { variables: Vec::new(), assigns: false, commands: Vec::new() };
    // Variables are declared if `:=`, `=` or a comma follows the first.
    let mut ahead = tokens.clone();
    if let Some(Token::Variable(..)) = ahead.next()
        && matches!(ahead.next(), Some(Token::Declare | Token::Assign | Token::Comma))
    {
        loop {
            let Some(Token::Variable(name, fields)) = tokens.next() else {
                return Err(Invalid::new("a comma is not followed by a variable"));
            };
            if !fields.is_empty() || name.is_empty() {
                return Err(Invalid::new(format!("'${name}' cannot be declared")));
            }
            all.variables.push(name);
            match tokens.next() {
                Some(Token::Comma) => {}
                Some(Token::Declare) => break,
                Some(Token::Assign) => {
                    all.assigns = true;
                    break;
                }
                _ => return Err(Invalid::new("':=' is missing behind a variable")),
            }
        }
    }
    loop {
        let command = command(tokens, depth)?;
        if command.is_empty() {
            return Err(Invalid::new("a command is missing"));
        }
        all.commands.push(command);
        if tokens.peek() != Some(&Token::Pipe) {
            return Ok(all);
        }
        tokens.next();
    }
}

fn command(tokens: &mut Tokens, depth: usize) -> Result<Vec<Term>, Invalid> {
    let mut terms = Vec::new();
    loop {
        let (root, fields) = match tokens.peek() {
            None | Some(Token::Pipe | Token::Close(_)) => return Ok(terms),
            Some(Token::Declare | Token::Assign | Token::Comma) => {
                return Err(Invalid::new("':=', '=' or ',' stands in a wrong place"));
            }
            Some(_) => match tokens.next() {
                Some(Token::Word(word)) => (Root::Function(word), Vec::new()),
                Some(Token::Fields(fields)) => (Root::Dot, fields),
                Some(Token::Variable(name, fields)) => (Root::Variable(name), fields),
                Some(Token::Literal(value)) => (Root::Literal(value), Vec::new()),
                Some(Token::Open) => {
                    let inner = pipeline(tokens, depth + 1)?;
                    let Some(Token::Close(fields)) = tokens.next() else {
                        return Err(Invalid::new("'(' without ')'"));
                    };
                    (Root::Pipeline(inner), fields)
                }
                _ => return Ok(terms),
            },
        };
        terms.push(Term { root, fields });
    }
}

fn finished(tokens: &mut Tokens) -> Result<(), Invalid> {
    match tokens.next() {
        None => Ok(()),
        Some(Token::Close(_)) => Err(Invalid::new("')' without '('")),
        Some(_) => Err(Invalid::new("an action has more words than its end")),
    }
}

fn deeper(depth: usize) -> Result<(), Invalid> {
    match depth > NESTING_MAX {
        true => Err(Invalid::new(format!("more than {NESTING_MAX} blocks inside one another"))),
        false => Ok(()),
    }
}
