// Tables of three columns stand as blocks on a phone (site.css): each cell gets its column's title.
function labelCells() {
  for (const table of document.querySelectorAll(".md-typeset table:not([class])")) {
    const titles = [...table.querySelectorAll("thead th")].map((cell) => cell.textContent.trim());
    for (const row of table.querySelectorAll("tbody tr")) {
      [...row.children].forEach((cell, column) => {
        if (column > 0 && titles[column]) cell.dataset.title = titles[column];
      });
    }
  }
}

// Browsers start no search worker for pages that are opened as files: say how to serve the site.
function explainSearch() {
  if (location.protocol !== "file:") return;
  const note = document.createElement("p");
  note.className = "site-hint";
  note.textContent = `These pages are opened as files, where search does not work. In the clone, type
    "python3 -m http.server -d build/site" and open http://localhost:8000`;
  document.querySelector(".md-content__inner")?.prepend(note);
}

document.addEventListener("DOMContentLoaded", () => {
  labelCells();
  explainSearch();
});
